"""Counts the trials that have ended by themselves.  Imported late, for it imports Ray Tune."""

from __future__ import annotations

from typing import Any

from ray import tune


class Watch(tune.Callback):  # type: ignore[misc]
    """After Ctrl-C, Ray Tune ends the trials that run and calls them terminated; this remembers how it was before."""

    ended = 0

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self.ended = sum(trial.is_finished() for trial in trials)
