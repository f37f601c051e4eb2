"""A sweep from start to end: its folder, Ray Tune over its trials, and going on after the driver died."""

from __future__ import annotations

import math
import os
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from services.config import CommonRun, ConfigError, dump_config, explain, parse_config
from services.config.base import ConfigModel
from services.config.load import read_settings
from services.config.sweep import SweepConfig
from services.run_folder import RunFolderError
from services.sweep.report import Outcome, outcomes_of, write_best
from services.sweep.resources import check_room, reserved_by
from services.sweep.space import Parameter, read_space
from services.sweep.trial import TrialPlan, run_name, run_trial

SWEEP_FILE = "sweep.yaml"
_LONGEST = 10**6
"""Reports after which ASHA would end a trial that does not end by itself."""
_TABLE_SECONDS = 15


class SweepError(RuntimeError):
    """A sweep has nothing to show."""


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """What a sweep leaves behind."""

    path: Path

    @property
    def settings_file(self) -> Path:
        """The run's settings with the section `sweep`, as resolved."""
        return self.path / SWEEP_FILE

    @property
    def runs(self) -> Path:
        """The trials' run folders."""
        return self.path / "runs"

    @property
    def tune(self) -> Path:
        """Ray Tune's own state."""
        return self.path / "tune"


class _File(ConfigModel):
    sweep: SweepConfig


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> tuple[SweepConfig, CommonRun]:
    """A sweep's settings and those of the run that it varies.

    Raises:
        ConfigError: lists everything that is wrong with either.
    """
    heading = f"{path} cannot be used"
    settings = read_settings(path, overrides)
    if "sweep" not in settings:
        raise ConfigError(
            "sweep: missing; it says what is searched, such as {space: {discount: ...}}", heading
        )
    section = settings.pop("sweep")
    problems: list[str] = []
    sweep = None
    try:
        sweep = SweepConfig.model_validate(section)
    except ValidationError as error:
        problems += [f"sweep.{line}" for line in explain(error, SweepConfig)]
    try:
        run = parse_config(settings, heading)
    except ConfigError as error:
        problems += error.problems
    if problems or sweep is None:
        raise ConfigError(problems, heading)
    return sweep, run


class Sweep:
    """A sweep over one run.

    Raises:
        ConfigError: the search space, or the run, cannot be used.
        PlacementError: the cluster can never hold a trial.
    """

    def __init__(self, sweep: SweepConfig, run: CommonRun, folder: SweepFolder) -> None:
        from services.ray_connection import connect
        from services.validate import describe

        self.settings, self.run, self.folder = sweep, run, folder
        self.parameters: list[Parameter] = read_space(sweep, run)
        self.plan = TrialPlan.of(run, sweep, self.parameters, folder.runs)
        describe(run)
        connect()
        check_room(self.plan, self.parameters, sweep.max_concurrent)

    @classmethod
    def create(cls, sweep: SweepConfig, run: CommonRun) -> Sweep:
        """A new sweep in `output_dir/run_name`; without a name, `sweep-<algorithm>-<date>-<time>`."""
        plain = run.model_dump()
        name = run.run_name or f"sweep-{plain['algorithm']}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = SweepFolder(Path(run.output_dir).expanduser().absolute() / name)
        if folder.path.exists():
            raise RunFolderError(
                f"run_name: {folder.path} exists; choose another run_name, or continue that sweep with "
                f"`greenroom sweep --resume {folder.path}`"
            )
        made = cls(sweep, run, folder)
        folder.runs.mkdir(parents=True)
        folder.settings_file.write_text(dump_config(run) + dump_config(_File(sweep=sweep)))
        return made

    @classmethod
    def open(cls, path: str | Path) -> Sweep:
        """A sweep that was started before."""
        folder = SweepFolder(Path(path).expanduser().absolute())
        if not folder.settings_file.is_file():
            raise RunFolderError(f"{path} is no sweep's folder: it has no {SWEEP_FILE}")
        return cls(*load_sweep(folder.settings_file), folder)

    def fit(self) -> list[Outcome]:
        """Run all trials, or, in a sweep that was started before, those that have not ended; write the best down.

        A trial that had failed for good is tried again.

        Raises:
            SweepError: no trial has come to anything.
            KeyboardInterrupt: by Ctrl-C, once the trials have been ended and Ray Tune's state is on the disk.
        """
        from ray import tune

        from services.sweep.watch import Watch

        # Tune's newer output cannot say which columns its table has, and trials must find the run's relative paths.
        os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
        os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
        # Small trials leave checkpoints often; that is no news.
        os.environ["TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S"] = "0"
        for advice in ("Choices for a categorical distribution", "Consider boosting PBT performance"):
            warnings.filterwarnings("ignore", advice)
        trainable = self._trainable()
        if list(self.folder.tune.glob("experiment_state-*.json")):
            tuner = tune.Tuner.restore(str(self.folder.tune), trainable=trainable, resume_errored=True)
        else:
            tuner = self._tuner(trainable)
        outcomes = outcomes_of(tuner.fit(), self.plan.metric)
        # A restored tuner has a watch of its own, among Ray Tune's loggers.
        callbacks = tuner._local_tuner.get_run_config().callbacks
        (watch,) = [callback for callback in callbacks if isinstance(callback, Watch)]
        unfinished = self._num_trials - watch.ended
        if unfinished:
            raise KeyboardInterrupt(
                f"{unfinished} trials have not ended; go on with `greenroom sweep --resume {self.folder.path}`"
            )
        if not any(outcome.score is not None for outcome in outcomes):
            raise SweepError("\n".join(["no trial has reported anything", *(o.told() for o in outcomes)]))
        write_best(self.folder.path, self.plan, self.parameters, outcomes, self.settings.mode)
        return outcomes

    @property
    def _num_trials(self) -> int:
        """How many there will be in the end."""
        grid = [len(parameter.values) for parameter in self.parameters if parameter.kind == "grid"]
        return self.settings.num_samples * math.prod(grid)

    def _trainable(self) -> Any:
        from ray import tune

        plan = self.plan

        def trial(config: dict[str, Any]) -> None:
            run_trial(plan, config)

        return tune.with_resources(trial, lambda config: reserved_by(plan, dict(config)))

    def _tuner(self, trainable: Any) -> Any:
        from ray import tune

        from services.sweep.watch import Watch

        settings = self.settings
        pbt = settings.scheduler == "pbt"
        return tune.Tuner(
            trainable,
            param_space={parameter.name: parameter.domain() for parameter in self.parameters},
            tune_config=tune.TuneConfig(
                metric=self.plan.metric,
                mode=settings.mode,
                num_samples=settings.num_samples,
                search_alg=self._searcher(),
                scheduler=self._scheduler(),
                trial_name_creator=_trial_name,
                trial_dirname_creator=_trial_name,
            ),
            run_config=tune.RunConfig(
                name=self.folder.tune.name,
                storage_path=str(self.folder.path),
                failure_config=tune.FailureConfig(max_failures=settings.max_failures),
                # The population deletes its own.
                checkpoint_config=tune.CheckpointConfig(num_to_keep=None if pbt else 2),
                callbacks=[Watch()],
                progress_reporter=tune.CLIReporter(
                    metric_columns={
                        "training_iteration": "reports",
                        "step": "step",
                        self.plan.metric: self.plan.metric,
                    },
                    parameter_columns=[parameter.name for parameter in self.parameters],
                    max_report_frequency=_TABLE_SECONDS,
                    sort_by_metric=True,
                ),
                verbose=1,
            ),
        )

    def _searcher(self) -> Any:
        from ray.tune.search import ConcurrencyLimiter
        from ray.tune.search.basic_variant import BasicVariantGenerator

        most = self.settings.max_concurrent
        if self.settings.search == "random":
            return BasicVariantGenerator(max_concurrent=most or 0, random_state=self.settings.seed)
        from ray.tune.search.optuna import OptunaSearch

        searcher = OptunaSearch(seed=self.settings.seed)
        return searcher if most is None else ConcurrencyLimiter(searcher, most)

    def _scheduler(self) -> Any:
        from ray.tune import schedulers

        settings = self.settings
        if settings.scheduler == "asha":
            return schedulers.ASHAScheduler(
                max_t=_LONGEST,
                grace_period=settings.grace_period,
                reduction_factor=settings.reduction_factor,
            )
        if settings.scheduler == "fifo":
            return schedulers.FIFOScheduler()
        import numpy as np

        from services.sweep.population import Population

        # It draws from the process's own generators.
        random.seed(settings.seed)
        np.random.seed(settings.seed)  # noqa: NPY002
        parameters = {parameter.name: parameter for parameter in self.parameters}
        return Population(
            time_attr="training_iteration",
            perturbation_interval=settings.perturbation_interval,
            quantile_fraction=settings.quantile_fraction,
            hyperparam_mutations={name: parameter.mutation() for name, parameter in parameters.items()},
            custom_explore_fn=lambda values: {n: parameters[n].clipped(v) for n, v in values.items()},
        )


def _trial_name(trial: Any) -> str:
    return run_name(trial.trial_id)
