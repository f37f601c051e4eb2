"""SMARL through the command: real processes that train, are told to change their team, are stopped and evaluated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.ray


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.cli", *arguments]


def options(folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    return {"cwd": folder, "env": environment, "text": True}


def greenroom(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, timeout=200, check=False, **options(cwd))


def logs(folder: Path) -> list[dict[str, float]]:
    path = folder / "runs" / "grid" / "metrics.jsonl"
    # The last line may be half written while a process is running.
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a configuration."""
    config = {
        "algorithm": "smarl",
        "environment": {"name": "ball_grid", "options": {"size": 4}},
        "agents": 3,
        "run_name": "grid",
        "args": {
            "num_episodes": 100_000, "max_episode_steps": 10, "batch_size": 16, "hidden_sizes": [16],
            "target_hidden_size": 16, "eval_interval": 0,
        },
        "workers": {"envs_per_runner": 2, "rollout_steps": 5},
    }  # fmt: skip
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def test_a_running_service_is_changed_stopped_and_evaluated(folder: Path) -> None:
    checked = greenroom("validate", "grid.yaml", cwd=folder)
    assert "3 agents in ball_grid" in checked.stdout, checked.stderr
    with subprocess.Popen(
        command("train", "grid.yaml"), stderr=subprocess.PIPE, **options(folder)
    ) as running:
        try:
            wait_for(lambda: (folder / "runs/grid/metrics.jsonl").exists() and len(logs(folder)) > 2)
            asked = greenroom("agents", "runs/grid", "--add", "2", "--remove", "0", cwd=folder)
            assert asked.stdout.strip() == "from the next episode on, 4 agents", asked.stderr
            wait_for(lambda: logs(folder)[-1]["num_agents"] == 4)
            wrong = greenroom("agents", "runs/grid", "--remove", "9", cwd=folder)
            assert wrong.returncode == 2
            assert "agents [9] do not exist; there are agents 0 to 3" in wrong.stderr
            assert "Traceback" not in wrong.stderr
        finally:
            running.send_signal(signal.SIGTERM)
            errors = running.communicate(timeout=120)[1]
    assert running.returncode == 130
    assert "Stopped: stopped by SIGTERM" in errors
    assert "greenroom train --resume" in errors

    answer = greenroom("evaluate", "runs/grid", "--num-agents", "8", "--samples", "3", cwd=folder)
    metrics = json.loads(answer.stdout)
    assert (metrics["num_agents"], metrics["episodes"]) == (8, 3), answer.stderr

    late = greenroom("agents", "runs/grid", "--add", "1", cwd=folder)
    assert late.returncode == 2
    assert "grid is not running on the Ray cluster" in late.stderr

    episodes = int(logs(folder)[-1]["episode"])
    resumed = greenroom("train", "--resume", "runs/grid", f"args.num_episodes={episodes + 4}", cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert "team_return_mean" in resumed.stdout
    assert logs(folder)[-1]["episode"] == episodes + 4
    assert logs(folder)[-1]["num_agents"] == 4


def test_what_a_language_model_command_says_of_a_smarl_run(folder: Path) -> None:
    run = folder / "runs" / "grid"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text((folder / "grid.yaml").read_text())
    answer = greenroom("generate", "runs/grid", "--prompt", "x", cwd=folder)
    assert answer.returncode == 2
    assert "no run of language models" in answer.stderr
    none = greenroom("evaluate", "runs/grid", cwd=folder)
    assert none.returncode == 2
    assert "there are: none" in none.stderr
