"""`greenroom sweep` as a user types it: a real process each time, one of which is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from sweep_runs import SMARL, logs, write
from typer.testing import CliRunner

from services.cli import app

ROOT = Path(__file__).parents[3]


def greenroom(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_second_trial(sweep: Path, reports: int, seconds: float) -> None:
    """Until Ray Tune has checkpoints of so many reports of two trials, which are trained one after the other."""
    end = time.monotonic() + seconds
    while True:
        newest = [
            max(json.loads(path.read_text())["reports"] for path in left)
            for trial in (sweep / "tune").glob("trial_*")
            if (left := list(trial.glob("checkpoint_*/.metadata.json")))
        ]
        if len(newest) == 2 and min(newest) >= reports:
            return
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.2)


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_a_sweep_whose_driver_was_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        {
            "space": {"discount": {"uniform": [0.9, 1]}, "sync_interval": {"int": [2, 3]}},
            "search": "optuna",
            "num_samples": 2,
            "max_concurrent": 1,
            "checkpoint_interval": 2,
        },
        environment={**SMARL["environment"], "options": {"pay": 1, "pace": 0.3}},
        args={"num_episodes": 16},
    )
    sweep = tmp_path / "sweep"
    first = greenroom("sweep", str(config))
    try:
        wait_for_second_trial(sweep, 8, 400)
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    killed = time.time()
    done, cut = sorted((sweep / "runs").iterdir(), key=lambda run: logs(run)[0]["time"])
    before = logs(done)
    assert len(before) == 16
    assert not (sweep / "best.yaml").exists()

    second = greenroom("sweep", "--resume", str(sweep))
    out, err = second.communicate(timeout=400)
    assert second.returncode == 0, err
    assert "2/2 (2 TERMINATED)" in out
    assert logs(done) == before
    resumed = logs(cut)
    assert [entry["episode"] for entry in resumed] == list(range(1, 17))
    assert sum(entry["time"] < killed for entry in resumed) >= 2
    assert resumed[-1]["time"] > killed
    best = yaml.safe_load((sweep / "best.yaml").read_text())
    assert 0.9 <= best["args"]["discount"] <= 1
    assert best["args"]["sync_interval"] in (2, 3)
    assert (sweep / "reward_by_parameter.png").is_file()


def test_what_cannot_be_swept_is_told_in_words(tmp_path: Path) -> None:
    config = write(tmp_path, {"space": {"discuont": {"uniform": [0, 1]}}})
    answer = CliRunner().invoke(app, ["sweep", str(config)])
    assert answer.exit_code == 2
    assert "sweep.space.discuont: there is no such setting; did you mean `discount`?" in answer.output
    answer = CliRunner().invoke(app, ["sweep", "--resume", str(tmp_path)])
    assert answer.exit_code == 2
    assert "is no sweep's folder: it has no sweep.yaml" in answer.output
    answer = CliRunner().invoke(app, ["sweep", str(config), "--resume", str(tmp_path)])
    assert "a sweep goes on with the settings in its folder" in answer.output
    (tmp_path / "sweep").mkdir()
    fine = write(tmp_path, {"space": {"discount": {"uniform": [0, 1]}}})
    answer = CliRunner().invoke(app, ["sweep", str(fine)])
    assert answer.exit_code == 2
    assert "choose another run_name, or continue that sweep" in answer.output


@pytest.mark.ray
def test_trials_side_by_side_must_not_find_gpus_by_their_numbers() -> None:
    command = [sys.executable, str(Path(__file__).with_name("gpu_rooms.py"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    side_by_side, alone, spread = json.loads(done.stdout.splitlines()[-1])
    assert "set placement.strategy=spread" in side_by_side["refused"]
    assert alone["bundles"] == [{"CPU": 1.0, "GPU": 0.2}] * 5
    assert (spread["strategy"], len(spread["bundles"])) == ("SPREAD", 5)
