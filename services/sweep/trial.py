"""One trial: a run with its own values, which tells Ray Tune of itself and leaves it checkpoints.

Runs in a process that Ray Tune starts and ends; the run's actors lie in the trial's placement group and end with it.
A checkpoint is one of the run's own, so a trial that died goes on from it, and PBT continues a good trial's with other
values.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config import CommonRun, ConfigError, dump_config, parse_config
from services.config.sweep import SweepConfig
from services.metrics import is_evaluation
from services.run_folder import RunFolder
from services.sweep.space import Parameter, plain_settings, with_values

_REPORTS, _NAME, _STEP = "reports", "name", "step"
"""What a checkpoint says of itself: reports so far, its folder's name, its step."""
_SHOWN_NAMES = 12


@dataclass(frozen=True)
class TrialPlan:
    """What all trials of a sweep have in common; travels to their processes."""

    plain: dict[str, Any]
    """The run's settings."""
    keys: dict[str, str]
    """Name of a parameter -> dotted key."""
    runs: str
    """The folder that holds the trials' run folders."""
    metric: str
    report_interval: int
    checkpoint_interval: int

    @classmethod
    def of(cls, run: CommonRun, sweep: SweepConfig, parameters: list[Parameter], runs: Path) -> TrialPlan:
        return cls(
            plain_settings(run),
            {parameter.name: parameter.key for parameter in parameters},
            str(runs),
            sweep.effective_metric(run),
            sweep.report_interval,
            sweep.effective_checkpoint_interval,
        )

    def config(self, values: Mapping[str, Any]) -> CommonRun:
        """The run with `values`, parameter by parameter; not in the sweep's folder.

        Raises:
            ConfigError: these values contradict one another.
        """
        return parse_config(
            with_values(self.plain, {self.keys[name]: value for name, value in values.items()})
        )

    def trial_config(self, values: Mapping[str, Any], trial_id: str) -> CommonRun:
        """The same as a run of trial `trial_id`: checkpoints are taken when Ray Tune is given them, and only then."""
        folder = {"output_dir": self.runs, "run_name": run_name(trial_id)}
        own = {"checkpoint_interval": 0, "keep_checkpoints": 1, "storage_path": None}
        return parse_config(with_values(plain_settings(self.config(values)), {**folder, **own}))


def run_name(trial_id: str) -> str:
    """The name of a trial and of its run folder, one of a kind on the cluster: actors are found by it."""
    return f"trial_{trial_id}"


def run_trial(plan: TrialPlan, values: dict[str, Any]) -> None:
    """Train until the run or Ray Tune ends it."""
    from ray import tune

    from services.trainer import trainer_of

    config = plan.trial_config(values, tune.get_context().get_trial_id())
    folder = RunFolder(Path(config.output_dir) / str(config.run_name))
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        shutil.rmtree(folder.path, ignore_errors=True)  # the trial died before its first checkpoint
        reports = Reports(plan, folder, done=0, step=-1, report=_report)
    else:
        there = checkpoint.get_metadata()
        _put_in_place(checkpoint, folder, there[_NAME], config)
        reports = Reports(plan, folder, done=there[_REPORTS], step=there[_STEP], report=_report)
    with trainer_of(config) as trainer:
        trainer.train(
            resume_from=None if checkpoint is None else folder.path, after_round=reports.after_round
        )
    reports.refuse_silence()


def _report(metrics: dict[str, Any], checkpoint: Path | None, about: dict[str, Any]) -> None:
    """Tell Ray Tune; returns when it has heard, or never where it ends the trial."""
    from ray import tune

    if checkpoint is None:
        tune.report(metrics)
        return
    left = tune.Checkpoint.from_directory(str(checkpoint))
    left.set_metadata(about)
    tune.report(metrics, checkpoint=left)


def _put_in_place(checkpoint: Any, folder: RunFolder, name: str, config: CommonRun) -> None:
    """Make `checkpoint`, of whichever trial, the only one of the run in `folder`."""
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_config(dump_config(config))
    with checkpoint.as_directory() as source:
        shutil.copytree(source, folder.checkpoints / name)


class Reports:
    """Turns what a run logs into reports: the mean of each metric since the last one.

    Args:
        done: reports of the trial before.
        step: that of the checkpoint from which the run goes on; what it logged until then has been reported.
        report: takes the metrics and, where one is due, a checkpoint and what is to be known of it.
    """

    def __init__(
        self,
        plan: TrialPlan,
        folder: RunFolder,
        *,
        done: int,
        step: int,
        report: Callable[[dict[str, Any], Path | None, dict[str, Any]], None],
    ) -> None:
        self._plan, self._folder, self._done, self._report = plan, folder, done, report
        self._step, self._read, self._rounds = step, 0, 0
        self._gathered: dict[str, list[float]] = defaultdict(list)
        self._latest: dict[str, float] = {}

    def after_round(self, leave_checkpoint: Callable[[], Path]) -> None:
        """Report, if it is time."""
        self._rounds += 1
        if self._rounds % self._plan.report_interval:
            return
        self._gather()
        self._latest |= {name: sum(values) / len(values) for name, values in self._gathered.items()}
        if self._plan.metric not in self._latest:
            return  # an evaluation may not have been due yet
        self._gathered.clear()
        self._done += 1
        checkpoint = leave_checkpoint() if self._done % self._plan.checkpoint_interval == 0 else None
        name = "" if checkpoint is None else checkpoint.name
        about = {_REPORTS: self._done, _NAME: name, _STEP: self._step}
        self._report(dict(self._latest), checkpoint, about)

    def refuse_silence(self) -> None:
        """Raise ConfigError if a whole run has logged nothing of what is compared."""
        if self._plan.metric not in self._latest:
            self._gather()
            known = {*self._gathered, *self._latest}
            shown = ", ".join(sorted(known)[:_SHOWN_NAMES]) or "nothing"
            raise ConfigError(
                f"sweep.metric: the run has reported no {self._plan.metric!r} in {self._rounds} rounds with "
                f"sweep.report_interval={self._plan.report_interval}; it logged {shown}"
            )

    def _gather(self) -> None:
        """Take in what has been logged since last time."""
        with self._folder.metrics_file.open("rb") as file:
            file.seek(self._read)
            lines = file.readlines()
            self._read = file.tell()
        for line in lines:
            entry = json.loads(line)
            step = entry.pop("step")
            if step < self._step or (step == self._step and not is_evaluation(entry)):
                continue
            entry.pop("time")
            for name, value in entry.items():
                if math.isfinite(value):
                    self._gathered[name].append(value)
            self._latest[_STEP] = self._step = step
