"""The trainers: `MAACTrainer` and `IACTrainer`, the Python face of a run.

Owns how the arguments of the specification become a configuration plus callables, and how a run is set up, resumed,
evaluated and saved.  What happens between is the training loop's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Self

from actors.recovery import recovering
from actors.rollout import RolloutCollector
from services.callables import reference_of
from services.checkpoint import AfterRound, CheckpointError, CheckpointStore, TrainerState
from services.config import (
    ActorCriticConfig,
    CommonRun,
    ConfigError,
    DataConfig,
    EngineConfig,
    IACConfig,
    LoraConfig,
    MAACConfig,
    ModelOptions,
    RunConfig,
    SMARLRunConfig,
    WandbConfig,
    dump_config,
    parse_config,
)
from services.evaluation import Evaluator
from services.launch import System, launch
from services.learner_group import LearnerLostError
from services.loop import Recorders, TrainingLoop, make_probes
from services.metrics import MetricsLogger
from services.progress import Progress
from services.remote_control import leave_address
from services.rollout_log import RolloutLog
from services.rollouts import collector_of
from services.round_collection import RoundCollection, read_ahead
from services.run_folder import RunFolder
from services.scaling import ScalingDesk
from services.smarl.trainer import SMARLTrainer
from services.sources import resolve_sources
from services.storage import checkpoints_of, leave_final_copy
from services.validate import check_run

Function = Callable[..., Any]


class ActorCriticTrainer:
    """What MAAC and IAC trainers share: everything but the class of their `args`.

    Keyword arguments are those of the specification; `run_options` are the further fields of a run's configuration
    (`engine`, `learner`, `lora`, `placement`, `seed`, `output_dir`, `run_name`, `storage_path`, `checkpoint_interval`,
    `keep_checkpoints`, `eval_greedy`, `reward_timeout_s`, `max_staleness`, `importance_sampling_cap`), as
    dictionaries or models.

    Raises:
        ConfigError: anything that can be found wrong before a model is loaded; lists all of it.
    """

    config_class: ClassVar[type[ActorCriticConfig]]

    def __init__(
        self,
        *,
        reward_func: Function,
        train_dataset: Any,
        agent_model: Any = None,
        agents: Sequence[Any] | None = None,
        critic_model: Any = None,
        critics: Sequence[Any] | None = None,
        tokenizer: Any = None,
        reward_processor: Function | None = None,
        formatters: Function | Sequence[Function | None] | None = None,
        args: ActorCriticConfig | None = None,
        eval_dataset: Any = None,
        model_config: dict[str, Any] | ModelOptions | None = None,
        wandb_config: dict[str, Any] | WandbConfig | None = None,
        metrics_callback: Function | None = None,
        external_transition: Function | None = None,
        **run_options: Any,
    ) -> None:
        args = args if args is not None else self.config_class()
        self.args = args
        options = ModelOptions.model_validate(model_config or {})
        engine = EngineConfig.model_validate(run_options.pop("engine", None) or {})
        given = run_options.pop("lora", None)
        lora = None if given is None else LoraConfig.model_validate(given)
        self._checked = check_run(
            args,
            reward_func=reward_func,
            train_dataset=train_dataset,
            agent_model=agent_model,
            agents=agents,
            critic_model=critic_model,
            critics=critics,
            tokenizer=tokenizer,
            reward_processor=reward_processor,
            formatters=formatters,
            external_transition=external_transition,
            metrics_callback=metrics_callback,
            eval_dataset=eval_dataset,
            model_options=options,
            engine=engine,
            lora=lora,
        )
        checked = self._checked
        functions = ("reward_func", "reward_processor", "external_transition", "metrics_callback")
        config = parse_config(
            {
                "algorithm": self.config_class.algorithm,
                "agents": [_written(model) for model in checked.models.agents],
                "critics": [_written(model) for model in checked.models.critics] or None,
                "tokenizer": [_written(each) for each in checked.models.tokenizers],
                **{name: _reference(getattr(checked, name)) for name in functions},
                "formatters": [_reference(each) for each in checked.formatters],
                "train_dataset": _written_data(train_dataset),
                "eval_dataset": None if eval_dataset is None else _written_data(eval_dataset),
                "args": args,
                "model_config": options,
                "engine": engine,
                "lora": lora,
                "wandb_config": wandb_config,
                **run_options,
            }
        )
        assert isinstance(config, RunConfig)
        self.config = config
        self._run: RunFolder | None = None
        self._system: System | None = None

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        """The trainer that a configuration file describes."""
        fields = {
            "seed", "output_dir", "run_name", "checkpoint_interval", "keep_checkpoints", "eval_greedy",
            "max_staleness", "importance_sampling_cap", "storage_path", "lora",
            "reward_timeout_s", "engine", "learner", "placement", "agent_model", "agents", "critic_model", "critics",
            "tokenizer", "args", "wandb_config", "train_dataset", "eval_dataset", "reward_func", "reward_processor",
            "formatters", "external_transition", "metrics_callback",
        }  # fmt: skip
        return cls(model_config=config.model_options, **{name: getattr(config, name) for name in fields})

    @property
    def run_folder(self) -> Path:
        """Where the run writes; made when training starts."""
        if self._run is None:
            raise RuntimeError("the run folder is made by train(); it has not been called yet")
        return self._run.path

    def train(
        self,
        *,
        resume_from: str | Path | None = None,
        max_updates: int | None = None,
        after_round: AfterRound | None = None,
    ) -> Path:
        """Train to the end of the configured epochs, or for `max_updates` more update rounds.

        A run that loses a learner goes back to its newest checkpoint by itself, `learner.max_restarts` times.

        Args:
            resume_from: a run folder; training goes on from its newest checkpoint.
            after_round: called between two rounds; what it raises ends the training.

        Returns:
            The run folder.  `final/` in it holds the trained models once all epochs are done.
        """
        run = self._open_run(resume_from)
        checkpoints = checkpoints_of(run, self.config)
        checkpoint = None if resume_from is None else checkpoints.latest()
        if resume_from is not None and checkpoint is None:
            raise CheckpointError(f"{run.path} has no complete checkpoint to resume from")
        stop_at = None if max_updates is None else _state_of(checkpoint).update_round + max_updates
        resuming = checkpoint is not None
        recovery: AbstractContextManager[None] = nullcontext()
        for restarts in count(1):
            try:
                with recovery, run.kept_once_started():
                    system = self._start_from(checkpoint)
                self._train(system, run, checkpoints, checkpoint, stop_at, after_round, resuming=resuming)
                return run.path
            except LearnerLostError as error:
                most = self.config.learner.max_restarts
                if restarts > most:
                    raise
                checkpoint, resuming = checkpoints.latest(), True
                plan = (
                    f"going on from {checkpoint or 'the beginning'} (restart {restarts} of at most {most}, "
                    "learner.max_restarts)"
                )
                recovery = recovering("a learner", error, plan)
                self.shutdown()
        raise AssertionError("unreachable")

    def _start_from(self, checkpoint: Path | None) -> System:
        system = self._start()
        if checkpoint is not None:
            system.learners.load(str(checkpoint), self._agent_folders(), self._critic_folders())
        return system

    def _train(
        self,
        system: System,
        run: RunFolder,
        checkpoints: CheckpointStore,
        checkpoint: Path | None,
        stop_at: int | None,
        after_round: AfterRound | None,
        *,
        resuming: bool,
    ) -> None:
        """Train from `checkpoint`, or from the beginning, until a learner is lost at most."""
        state = _state_of(checkpoint)
        recorders = self._recorders(run, checkpoints, state, resuming=resuming)
        leave_address(run)
        desk = ScalingDesk(run)
        collector, rows = self._collector(self.args.num_generations), self._checked.train_rows
        loop = TrainingLoop(
            self.config,
            system,
            RoundCollection(
                self.args, rows, collector, system.generation, system.generate, self._evaluator(system)
            ),
            make_probes(system, collector.prompts.first(dict(rows[0]))),
            recorders,
            state,
            ahead=None if checkpoint is None else read_ahead(checkpoint),
            save_learners=lambda folder: self._save(folder, state=True),
            metrics_callback=self._checked.metrics_callback,
            workers_wanted=desk.wanted,
        )
        try:
            loop.run(stop_at, after_round)
        finally:
            desk.close()
            recorders.close()
        if loop.state.epoch >= self.args.num_train_epochs:
            self._save(run.final, state=False)
        leave_final_copy(run, self.config)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current weights on the evaluation set."""
        system = self._start()
        evaluator = self._evaluator(system)
        if evaluator is None:
            raise ConfigError("eval_dataset: missing, so there is nothing to evaluate on")
        return evaluator.run(0, 0)

    def save_model(self, folder: str | Path) -> None:
        """Write all models in Hugging Face layout with their tokenizers: `agent_i/`, and `critic/` (MAAC) or
        `agent_i/critic/` (IAC); a single IAC agent goes into `folder` itself."""
        self._save(Path(folder), state=False)

    def shutdown(self) -> None:
        """End the engines and learners."""
        if self._system is not None:
            self._system.shutdown()
            self._system = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _open_run(self, resume_from: str | Path | None) -> RunFolder:
        if resume_from is not None:
            self._run = RunFolder.open(resume_from)
        elif self._run is None:
            self._run = RunFolder.create(self.config.output_dir, self.config.run_name, self.config.algorithm)
        self._run.write_config(dump_config(self.config))
        return self._run

    def _start(self) -> System:
        """The running system; started on first use, kept until `shutdown`."""
        if self._system is None:
            run = self._run or self._open_run(None)
            sources = resolve_sources(self._checked.models, self.args.num_agents, run.sources)
            self._system = launch(self.config, sources, self._checked.tokenizers, run.path)
        return self._system

    def _recorders(
        self, run: RunFolder, checkpoints: CheckpointStore, state: TrainerState, *, resuming: bool
    ) -> Recorders:
        items = len(self._checked.train_rows)
        return Recorders(
            MetricsLogger(
                run, self.config.wandb_config, resume_step=state.reward_evaluations if resuming else None
            ),
            RolloutLog(run, resume_round=state.update_round if resuming else None),
            checkpoints,
            Progress(items * self.args.num_train_epochs, items * state.epoch + state.next_item),
        )

    def _collector(self, num_generations: int) -> RolloutCollector:
        checked = self._checked
        return collector_of(
            self.config,
            num_generations=num_generations,
            reward_func=checked.reward_func,
            reward_processor=checked.reward_processor,
            formatters=checked.formatters,
            external_transition=checked.external_transition,
        )

    def _evaluator(self, system: System) -> Evaluator | None:
        rows = self._checked.eval_rows
        if rows is None:
            return None
        sampling = system.sampling.greedy() if self.config.eval_greedy else system.sampling
        return Evaluator(
            self._collector(1),
            rows,
            num_samples=self.args.eval_num_samples,
            batch_size=self.args.eval_batch_size,
            generate=lambda prompts, seeds: system.generation.generate(prompts, seeds, sampling),
            metrics_callback=self._checked.metrics_callback,
        )

    def _save(self, folder: Path, *, state: bool) -> None:
        assert self._system is not None, (
            "models are saved from running learners: call train() or evaluate() first"
        )
        self._system.learners.save(str(folder), self._agent_folders(), self._critic_folders(), state=state)
        for tokenizer, name in zip(self._checked.tokenizers, self._agent_folders(), strict=True):
            tokenizer.save_pretrained(str(folder / name))

    def _agent_folders(self) -> list[str]:
        agents = range(self.args.num_agents)
        return ["."] if self._is_single_iac() else [f"agent_{agent}" for agent in agents]

    def _critic_folders(self) -> dict[int, str]:
        """Critic -> folder; a critic that several agents share lies with the first of them."""
        if self._system is None or not self._system.learners.critics:
            return {}
        if isinstance(self.args, MAACConfig):
            return {0: "critic"}
        owners = self._system.learners.layout.critic_of_agent
        folders = self._agent_folders()
        return {key: f"{folders[owners.index(key)]}/critic" for key in self._system.learners.critics}

    def _is_single_iac(self) -> bool:
        return isinstance(self.args, IACConfig) and self.args.num_agents == 1


class MAACTrainer(ActorCriticTrainer):
    """Multi-agent actor-critic: one critic reads the joint history, all agents share its TD error.

    >>> trainer = MAACTrainer(agent_model="path/to/model", critic_model="path/to/model", reward_func=my_reward,
    ...                       train_dataset=rows, args=MAACConfig(num_turns=1))  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    config_class = MAACConfig


class IACTrainer(ActorCriticTrainer):
    """Independent actor-critic: each agent has a critic of its own, a model or a head on its backbone."""

    config_class = IACConfig


LANGUAGE_TRAINERS: dict[str, type[ActorCriticTrainer]] = {"maac": MAACTrainer, "iac": IACTrainer}
"""The trainer of each `algorithm` of language models."""


def trainer_of(config: CommonRun) -> ActorCriticTrainer | SMARLTrainer:
    """The trainer that a configuration file describes."""
    if isinstance(config, SMARLRunConfig):
        return SMARLTrainer.from_config(config)
    assert isinstance(config, RunConfig)
    return LANGUAGE_TRAINERS[config.algorithm].from_config(config)


def _state_of(checkpoint: Path | None) -> TrainerState:
    return TrainerState() if checkpoint is None else CheckpointStore.read_state(checkpoint, TrainerState)


def _written(source: Any) -> str:
    """How a model or tokenizer stands in the run's config.yaml; an object is only described there."""
    return str(source) if isinstance(source, str | Path) else f"<{type(source).__name__} object>"


def _reference(function: Callable[..., Any] | None) -> str | None:
    return None if function is None else reference_of(function)


def _written_data(source: Any) -> Any:
    if isinstance(source, DataConfig | str):
        return source
    return {"path": f"<{type(source).__name__} object>"}
