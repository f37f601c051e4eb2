"""`greenroom scale`: another number of generation workers while a language-model run trains."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

pytestmark = pytest.mark.ray

CALLBACKS = Path(__file__).with_name("callbacks_for_training.py")


def options(folder: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return {"cwd": folder, "env": environment, "text": True}


def greenroom(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, capture_output=True, timeout=200, check=False, **options(cwd))


class Training:
    """`greenroom train` as another process, and what it says."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        command = [sys.executable, "-m", "services.cli", "train", "run.yaml", *overrides]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, **options(folder))
        self.said = ""
        assert self.process.stderr is not None
        self._thread = threading.Thread(target=self._listen, args=(self.process.stderr,), daemon=True)
        self._thread.start()

    def _listen(self, stream: IO[str]) -> None:
        for line in stream:
            self.said += line

    def wait_until_it_says(self, pattern: str, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not re.search(pattern, self.said):
            assert time.monotonic() < end, self.said[-3000:]
            time.sleep(0.1)

    def wait_until_it_updates(self, metrics: Path, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not (metrics.is_file() and metrics.read_text()):
            assert time.monotonic() < end, self.said[-3000:]
            time.sleep(0.1)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)


@pytest.fixture
def folder(tmp_path: Path, small_model: Path) -> Path:
    """A working directory with a data set and a configuration."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def f{i}():"}) + "\n" for i in range(8))
    )
    config = {
        "algorithm": "maac",
        "agent_model": str(small_model),
        "critic_model": str(small_model),
        "reward_func": f"{CALLBACKS}:letters",
        "train_dataset": "rows.jsonl",
        "run_name": "run",
        "checkpoint_interval": 0,
        "engine": {"backend": "transformers"},
        "args": {
            "num_turns": 1, "num_train_epochs": 100_000, "num_generations": 2, "max_new_tokens": 8,
            "early_termination_threshold": None,
        },
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def numbers(run: Path, updates: int) -> list[dict[str, float]]:
    timed = ("second", "time", "idle", "gap")  # gaps: sums of other batches are rounded differently
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][:updates]
    return [{k: v for k, v in entry.items() if not any(t in k for t in timed)} for entry in entries]


@pytest.mark.slow
def test_a_running_service_gets_more_workers_then_fewer_and_computes_the_same(folder: Path) -> None:
    training = Training(folder)
    try:
        training.wait_until_it_updates(folder / "runs" / "run" / "metrics.jsonl")
        asked = greenroom("scale", "runs/run", "--workers-per-agent", "2", cwd=folder)
        assert asked.stdout.strip() == "from the next update round on, 2 generation workers per agent", (
            asked.stderr
        )
        training.wait_until_it_says("update round [0-9]+: 2 generation workers per agent")
        greenroom("scale", "runs/run", "--workers-per-agent", "1", cwd=folder)
        training.wait_until_it_says("update round [0-9]+: 1 generation workers per agent")
    finally:
        status = training.end()
    assert status == 130
    rounds = [int(n) for n in re.findall("update round ([0-9]+): ", training.said)]
    run = folder / "runs" / "run"
    updates = len((run / "metrics.jsonl").read_text().splitlines())
    assert rounds[0] < rounds[1] <= updates
    late = greenroom("scale", "runs/run", "--workers-per-agent", "2", cwd=folder)
    assert late.returncode == 2
    assert "run is not running on the Ray cluster" in late.stderr

    alone = greenroom("train", "run.yaml", "run_name=alone", f"--max-updates={rounds[0] + 5}", cwd=folder)
    assert alone.returncode == 0, alone.stderr
    assert numbers(folder / "runs" / "alone", rounds[0] + 5) == numbers(run, rounds[0] + 5)


def test_a_team_is_not_scaled_but_changed(folder: Path) -> None:
    team = folder / "runs" / "team"
    team.mkdir(parents=True)
    (team / "config.yaml").write_text("algorithm: smarl\nenvironment: ball_grid\n")
    answer = greenroom("scale", "runs/team", "--workers-per-agent", "2", cwd=folder)
    assert answer.returncode == 2
    assert "team is no run of language models; `greenroom agents` changes a SMARL team" in answer.stderr
