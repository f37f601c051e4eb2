"""From what a run logs to what a trial reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.config import ConfigError
from services.run_folder import RunFolder
from services.sweep.trial import Reports, TrialPlan

Report = tuple[dict[str, Any], Path | None, dict[str, Any]]


class Run:
    """A run folder into which a test logs, and the reports made of it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.folder = RunFolder(folder)
        self.told: list[Report] = []
        settings = {"metric": "return", "report_interval": 1, "checkpoint_interval": 100}
        start = {name: changes.pop(name, default) for name, default in (("done", 0), ("step", -1))}
        plan = TrialPlan(plain={}, keys={}, runs="", **{**settings, **changes})
        self.reports = Reports(plan, self.folder, **start, report=lambda *report: self.told.append(report))

    def round(self, *entries: dict[str, float]) -> None:
        with self.folder.metrics_file.open("a") as file:
            file.writelines(json.dumps({"time": 1.0, **entry}) + "\n" for entry in entries)
        self.reports.after_round(lambda: self.folder.checkpoints / "step_1")

    def metrics(self, name: str) -> Sequence[float]:
        return [metrics[name] for metrics, _, _ in self.told]


def test_a_report_is_the_mean_since_the_last_one(tmp_path: Path) -> None:
    run = Run(tmp_path, report_interval=2)
    for step, value in enumerate([1, 3, 5, 9]):
        run.round({"step": step, "return": value})
    assert run.metrics("return") == [2, 7]
    assert run.metrics("step") == [1, 3]
    assert all("time" not in metrics for metrics, _, _ in run.told)


def test_what_is_logged_seldom_keeps_its_value_and_is_waited_for(tmp_path: Path) -> None:
    run = Run(tmp_path, metric="eval/return")
    run.round({"step": 1, "return": 1})
    run.round({"step": 1, "eval/return": 7}, {"step": 2, "return": 2})
    run.round({"step": 3, "return": 3})
    assert run.metrics("eval/return") == [7, 7]
    assert run.metrics("return") == [1.5, 3]


def test_rounds_that_log_nothing_are_told_with_the_last_values(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.round({"step": 1, "return": 4})
    run.round()
    assert run.metrics("return") == [4, 4]


def test_a_number_that_is_none_is_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.round({"step": 1, "return": 4, "loss": float("nan")})
    assert "loss" not in run.told[0][0]


def test_checkpoints_come_with_every_nth_report_and_say_where_they_stand(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint_interval=2)
    for step in range(1, 5):
        run.round({"step": step, "return": 0})
    left = tmp_path / "checkpoints" / "step_1"
    assert [checkpoint for _, checkpoint, _ in run.told] == [None, left, None, left]
    assert run.told[1][2] == {"reports": 2, "name": "step_1", "step": 2}


def test_after_a_checkpoint_only_what_came_later_is_reported(tmp_path: Path) -> None:
    run = Run(tmp_path, done=2, step=20, checkpoint_interval=3)
    run.round(
        {"step": 10, "return": 1},
        {"step": 20, "return": 2},
        {"step": 20, "eval/return": 6},
        {"step": 30, "return": 3},
    )
    assert run.metrics("return") == [3]
    assert run.metrics("eval/return") == [6]
    assert run.told[0][2]["reports"] == 3


def test_a_run_that_never_logs_what_is_compared_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, metric="retrun")
    run.round({"step": 1, "return": 1})
    with pytest.raises(ConfigError, match=r"reported no 'retrun' in 1 rounds .* it logged return, step"):
        run.reports.refuse_silence()
    assert not run.told
