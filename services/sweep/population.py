"""Population based training whose copies are copies.  Imported late, for it imports Ray Tune."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining, TrialScheduler

_COPIED = "copied_checkpoint"
_KEPT = 3
"""Checkpoints of a trial: the newest, and what Ray Tune may still know as such."""


class Population(PopulationBasedTraining):  # type: ignore[misc]
    """Ray's scheduler, with three differences.

    - A trial that copies another gets files of its own: it may start long after the other has deleted that checkpoint.
    - A trial's older checkpoints are deleted here, for Ray Tune counts a copied one twice.
    - Ray's ends and restarts every trial in turn while any other waits, so that all get their share where not all fit.
      Here a trial goes on where all have been running at once: who waits then only starts again, from its copy, and
      needs nobody's room.
    """

    _most_at_once = 0

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        live = tune_controller.get_live_trials()
        self._most_at_once = max(self._most_at_once, sum(other.status == Trial.RUNNING for other in live))
        decision: str = super().on_trial_result(tune_controller, trial, result)
        _delete_old_checkpoints(tune_controller, trial, keep=_KEPT)
        fit = len(live) <= self._most_at_once
        return TrialScheduler.CONTINUE if decision == TrialScheduler.PAUSE and fit else decision

    def _exploit(self, tune_controller: Any, trial: Any, trial_to_clone: Any) -> None:
        super()._exploit(tune_controller, trial, trial_to_clone)
        manager = trial.run_metadata.checkpoint_manager
        source = manager._latest_checkpoint_result
        target = Path(trial.storage.trial_fs_path) / _COPIED
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source.checkpoint.path, target, copy_function=_link)
        kind, result = type(source.checkpoint), type(source)
        manager._latest_checkpoint_result = result(
            checkpoint=kind(str(target), source.checkpoint.filesystem), metrics=source.metrics
        )
        # Its own are numbered again from the copied one's on; written over, they would change under who copied them.
        _delete_old_checkpoints(tune_controller, trial, keep=0)


def _link(source: str, target: str) -> None:
    """A second name for a file: takes no time or room.  A copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _delete_old_checkpoints(tune_controller: Any, trial: Any, *, keep: int) -> None:
    found = sorted(Path(trial.storage.trial_fs_path).glob("checkpoint_*"))
    old = found[: len(found) - keep]
    if len(found) <= keep:
        return
    # What is on the disk must not name a checkpoint that is gone.
    tune_controller._tune_controller.checkpoint(force=True, wait=True)  # what schedulers get is a wrapper
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
