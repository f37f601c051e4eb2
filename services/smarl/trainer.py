"""`SMARLTrainer`: the Python face of a SMARL run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from services.checkpoint import AfterRound, CheckpointError
from services.config import ConfigError, SMARLConfig, SMARLRunConfig, dump_config, parse_config
from services.metrics import MetricsLogger
from services.progress import Progress
from services.remote_control import leave_address
from services.run_folder import RunFolder
from services.smarl.blueprint import draw
from services.smarl.loop import TeamLoop, TeamRecorders, TeamState
from services.smarl.plot import plot_returns
from services.smarl.remote_control import coordinator_name
from services.smarl.system import TeamSystem
from services.storage import checkpoints_of, leave_final_copy


class SMARLTrainer:
    """Trains DDPG agents around a central network, and a target network that picks whom each agent aims at.

    Args:
        environment: a name, or a section `environment` of the configuration.
        agents: how many agents, or from which episode on how many.
        args: the algorithm's settings.
        run_options: further fields of the run's configuration (`workers`, `sequence_reward`, `seed`, `output_dir`,
            `run_name`, `checkpoint_interval`, `keep_checkpoints`, `wandb_config`).

    Raises:
        ConfigError: anything that can be found wrong before an actor is started; lists all of it.
    """

    def __init__(
        self,
        *,
        environment: Any,
        agents: int | dict[int, int] = 3,
        args: SMARLConfig | dict[str, Any] | None = None,
        **run_options: Any,
    ) -> None:
        config = parse_config(
            {
                "algorithm": "smarl",
                "environment": environment,
                "agents": agents,
                "args": args if args is not None else SMARLConfig(),
                **run_options,
            }
        )
        assert isinstance(config, SMARLRunConfig)
        self._prepare(config)

    @classmethod
    def from_config(cls, config: SMARLRunConfig) -> Self:
        """The trainer that a configuration file describes."""
        trainer = cls.__new__(cls)
        trainer._prepare(config)
        return trainer

    def _prepare(self, config: SMARLRunConfig) -> None:
        self.config = config
        self._blueprint = draw(config)
        self._run: RunFolder | None = None
        self._system: TeamSystem | None = None

    @property
    def run_folder(self) -> Path:
        """Where the run writes; made when training starts."""
        if self._run is None:
            raise RuntimeError("the run folder is made by train(); it has not been called yet")
        return self._run.path

    @property
    def system(self) -> TeamSystem:
        """The running actors."""
        if self._system is None:
            raise RuntimeError("the actors are started by train() or evaluate(); neither has been called yet")
        return self._system

    def train(
        self,
        *,
        resume_from: str | Path | None = None,
        max_updates: int | None = None,
        after_round: AfterRound | None = None,
    ) -> Path:
        """Train to the end of the configured episodes, or for `max_updates` more rounds of episodes side by side.

        Args:
            resume_from: a run folder; training goes on from its newest checkpoint.
            after_round: called between two rounds; what it raises ends the training.

        Returns:
            The run folder.
        """
        run = self._open_run(resume_from)
        checkpoints = checkpoints_of(run, self.config)
        checkpoint = None if resume_from is None else checkpoints.latest()
        if resume_from is not None and checkpoint is None:
            raise CheckpointError(f"{run.path} has no complete checkpoint to resume from")
        state = (
            TeamState(team_set_for=0) if checkpoint is None else checkpoints.read_state(checkpoint, TeamState)
        )
        if self._system is not None and checkpoint is not None:
            self.shutdown()
        with run.kept_once_started():
            system = self._start(None if checkpoint is None else str(checkpoint))
        leave_address(run)
        logger = MetricsLogger(
            run, self.config.wandb_config, resume_step=state.env_steps if checkpoint is not None else None
        )
        progress = Progress(self.config.args.num_episodes, state.episode, unit="episode")

        def show(episodes: int, metrics: dict[str, float]) -> None:
            progress.items(episodes)
            progress.show(
                {
                    "agents": f"{metrics['num_agents']:.0f}",
                    "return": f"{metrics['return_mean']:.3f}",
                    "steps/s": f"{metrics['env_steps_per_second']:.0f}",
                }
            )

        try:
            TeamLoop(self.config, system, TeamRecorders(logger, checkpoints, show), state).run(
                max_updates, after_round
            )
        finally:
            logger.close()
            progress.close()
            plot_returns(run.path)
        leave_final_copy(run, self.config)
        return run.path

    def evaluate(
        self,
        *,
        num_agents: int | None = None,
        episodes: int | None = None,
        checkpoint: str | Path | None = None,
    ) -> dict[str, float]:
        """Play `episodes` without exploration.

        Args:
            num_agents: how many agents play; default: those that were trained.  At any other number, the central
                actor plays for every agent.
            checkpoint: folder of a checkpoint to load; only before anything has been started.
        """
        system = self._start(None if checkpoint is None else str(checkpoint))
        count = num_agents or system.num_agents
        if system.runners.has_targets and count < 2:
            raise ConfigError(f"num_agents: {count} agent has nobody to aim at; give at least 2")
        returns = system.evaluate(range(episodes or self.config.args.eval_episodes), count)
        return {
            "num_agents": float(count),
            "episodes": float(len(returns)),
            "return_mean": float(returns.mean()),
            "team_return_mean": float(returns.sum(1).mean()),
            "team_return_std": float(returns.sum(1).std()),
        }

    def add_agents(self, count: int) -> int:
        """Have `count` agents join before the next episode; callable from another thread while `train` runs.

        Returns how many agents there will be.
        """
        return int(self.system.keeper.ask("request", count, []))

    def remove_agents(self, numbers: Sequence[int]) -> int:
        """Have agents `numbers` leave before the next episode; the others are numbered from 0 again."""
        return int(self.system.keeper.ask("request", 0, list(numbers)))

    def shutdown(self) -> None:
        """End all actors."""
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

    def _start(self, checkpoint: str | None = None) -> TeamSystem:
        """The running system; started on first use, kept until `shutdown`."""
        if self._system is None:
            name = "evaluation" if self._run is None else self._run.path.name
            folder = None if self._run is None else self._run.path
            self._system = TeamSystem(
                self.config, self._blueprint, coordinator_name(name), checkpoint, folder
            )
        return self._system
