"""The command as a user types it: a real process each time."""

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
from typer.testing import CliRunner

from services.cli import app
from services.config import load_config

CALLBACKS = Path(__file__).with_name("callbacks_for_training.py")


def greenroom(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


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
        "engine": {"backend": "transformers"},
        "args": {
            "num_turns": 1,
            "num_train_epochs": 2,
            "num_generations": 2,
            "max_new_tokens": 8,
            "early_termination_threshold": None,
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.mark.ray
def test_train_stop_resume_generate_and_evaluate(folder: Path) -> None:
    first = greenroom("train", "run.yaml", "args.discount=0.9", "--max-updates", "1", cwd=folder)
    assert first.returncode == 0, first.stderr
    run = folder / "runs" / "run"
    assert load_config(run / "config.yaml").args.discount == 0.9
    assert not (run / "final").exists()

    again = greenroom("train", "run.yaml", cwd=folder)
    assert again.returncode == 2
    assert "holds a run already" in again.stderr
    assert "Traceback" not in again.stderr

    resumed = greenroom("train", "--resume", "runs/run", cwd=folder)
    assert resumed.returncode == 0, resumed.stderr
    assert f"run folder: {run}" in resumed.stdout
    assert "turn_1/reward_mean: " in resumed.stdout
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [8, 16, 24, 32]

    answers = greenroom("generate", "runs/run", "--prompt", "def f():", "-n", "2", "--agent", "1", cwd=folder)
    assert answers.returncode == 0, answers.stderr
    assert answers.stdout.count("--- agent 1, prompt 1, sample") == 2

    evaluated = greenroom("evaluate", "runs/run", "--samples", "3", cwd=folder)
    assert evaluated.returncode == 0, evaluated.stderr
    assert 0 <= json.loads(evaluated.stdout)["eval/turn_1/reward_mean"] <= 1


@pytest.mark.ray
def test_ctrl_c_leaves_a_checkpoint_and_no_process(folder: Path) -> None:
    command = [sys.executable, "-m", "services.cli", "train", "run.yaml", "args.num_train_epochs=2000"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        metrics = folder / "runs" / "run" / "metrics.jsonl"
        for _ in range(1200):
            if metrics.exists() and len(metrics.read_text().splitlines()) > 3:
                break
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopped: stopped by SIGINT" in stderr
    assert "continue with `greenroom train --resume" in stderr
    assert list((folder / "runs" / "run" / "checkpoints").glob("step_*/trainer_state.json"))
    for _ in range(100):
        listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        left = [line for line in listing.splitlines() if str(folder) in line]
        if not left:
            break
        time.sleep(0.1)
    assert not left


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ("discount=0.9", ["discount", "args.discount"]),
        ("args.num_turn=2", ["args.num_turn", "num_turns"]),
        ("args.num_turns=2", ["num_generations"]),
        ("agent_model=nowhere/at/all", ["agent_model", "nowhere/at/all"]),
        ("reward_func=nothing:here", ["reward_func", "nothing:here"]),
        ("train_dataset=missing.jsonl", ["train_dataset", "missing.jsonl"]),
    ],
)
def test_bad_input_is_one_message_that_names_the_field(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: str, messages: list[str]
) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["validate", "run.yaml", change])
    assert result.exit_code == 2
    for message in messages:
        assert message in result.output


def test_a_good_configuration_is_fine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, ["validate", "run.yaml"])
    assert result.exit_code == 0
    assert "8 training rows, 2 agents" in result.output


@pytest.mark.parametrize("algorithm", ["maac", "iac"])
def test_a_full_configuration_is_printed(algorithm: str) -> None:
    result = CliRunner().invoke(app, ["config", algorithm])
    assert result.exit_code == 0
    assert f"algorithm: {algorithm}" in result.output
    assert CliRunner().invoke(app, ["config", "nothing"]).exit_code == 2
