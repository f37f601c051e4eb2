"""Processes are killed, stopped and taken away while language models train: the run goes on, or resumes, the same."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from callbacks_for_training import letters
from language_runs import LEARN, ROWS, assert_same_run

ARGS = {**LEARN, "num_train_epochs": 2, "num_turns": 1, "num_generations": 4, "rollout_buffer_size": 16}


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("victim", ["policy", pytest.param("critic", marks=pytest.mark.slow)])
def test_a_run_that_loses_a_learner_goes_on_from_its_checkpoint(
    make: Any, tmp_path: Path, victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    make("maac", ARGS, run_name="whole").train()
    calls = 0

    def kills(first: list[str], second: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 11:  # in the fourth round; the last checkpoint is of the second
            learners = hurt._system.learners
            group = learners.policies[1] if victim == "policy" else learners.critics[0]
            os.kill(ray.get(group.actors[0].ready.remote(), timeout=60), signal.SIGKILL)
        return letters(first, second)

    hurt = make("maac", ARGS, run_name="hurt", reward_func=kills, checkpoint_interval=2)
    hurt.train()
    message = "died while .* going on from .*step_00000032 .restart 1 of at most 3"
    assert re.search(message, caplog.text, re.DOTALL)  # with what Ray says in between
    assert_same_run(tmp_path / "whole", tmp_path / "hurt")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_an_engine_that_hangs_is_replaced_and_nothing_of_the_run_changes(make: Any, tmp_path: Path) -> None:
    make("maac", ARGS, run_name="whole").train()
    calls = 0

    def freezes(first: list[str], second: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 4:  # the last of the first round: the next that the engine gets are new weights
            (worker,) = hurt._system.generation.pools[1].workers
            frozen.append(ray.get(worker.ready.remote(), timeout=60)["pid"])
            os.kill(frozen[0], signal.SIGSTOP)
        return letters(first, second)

    frozen: list[int] = []
    engine = {"backend": "transformers", "generate_timeout_s": 10}
    hurt = make("maac", ARGS, run_name="hurt", reward_func=freezes, engine=engine)
    hurt.train()
    assert hurt._system.generation.pools[1].recoveries == 1
    assert_same_run(tmp_path / "whole", tmp_path / "hurt")
    assert not psutil.pid_exists(frozen[0])


RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They outlive a killed cluster until they give up on its head, after a minute or so; they hold nothing of the run."""
CALLBACKS = Path(__file__).with_name("callbacks_for_training.py")


@pytest.fixture
def folder(tmp_path: Path, small_model: Path) -> Path:
    """A working directory with a data set and a configuration."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = {
        "algorithm": "maac",
        "agent_model": str(small_model),
        "critic_model": str(small_model),
        "reward_func": f"{CALLBACKS}:letters",
        "train_dataset": "rows.jsonl",
        "checkpoint_interval": 2,
        "engine": {"backend": "transformers"},
        "args": {**ARGS, "max_new_tokens": 12, "temperature": 1.0, "top_p": 1.0, "num_train_epochs": 6,
                 "early_termination_threshold": None},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """For a head that is killed: it leaves its address there, and whoever names none would look for it."""
    with tempfile.TemporaryDirectory(prefix="gr-", ignore_cleanup_errors=True) as path:
        yield path


def start(folder: Path, *arguments: str, **environment: str) -> psutil.Popen:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", **environment}
    env.pop("RAY_ADDRESS", None) if "RAY_ADDRESS" not in environment else None
    command = [sys.executable, "-m", "services.cli", "train", *arguments]
    return psutil.Popen(command, cwd=folder, env=env, stderr=(folder / "said").open("a"))


def checkpoints(run: Path) -> set[Path]:
    return set(run.glob("checkpoints/step_*"))


def wait_for_checkpoint(
    run: Path, process: psutil.Popen, seconds: float = 240, seen: Set[Path] = frozenset()
) -> None:
    end = time.monotonic() + seconds
    while checkpoints(run) <= seen:
        assert process.poll() is None, (run.parents[1] / "said").read_text()
        assert time.monotonic() < end, f"no new checkpoint of {run} after {seconds} s"
        time.sleep(0.05)


def finish(folder: Path, process: psutil.Popen) -> None:
    assert process.wait(timeout=280) == 0, (folder / "said").read_text()


def resume(
    folder: Path, run: Path, record_property: Callable[[str, object], None], **environment: str
) -> None:
    """Resume a run to its end; record how long it takes until it has done something new."""
    began, seen = time.monotonic(), checkpoints(run)
    process = start(folder, "--resume", str(run), **environment)
    wait_for_checkpoint(run, process, seen=seen)
    seconds = time.monotonic() - began
    record_property("recovery", f"a resumed run has its next checkpoint after {seconds:.1f} s")
    finish(folder, process)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_driver_takes_everything_with_it_and_the_run_resumes_the_same(
    folder: Path, record_property: Callable[[str, object], None]
) -> None:
    run = folder / "runs" / "hurt"
    driver = start(folder, "run.yaml", "run_name=hurt")
    wait_for_checkpoint(run, driver)
    family = driver.children(recursive=True)
    assert any("GenerationWorker" in " ".join(each.cmdline()) for each in family)
    driver.kill()
    driver.wait(timeout=30)
    agents = [each for each in family if each.name() in RAY_AGENTS]
    _, left = psutil.wait_procs([each for each in family if each not in agents], timeout=60)
    assert left == []
    resume(folder, run, record_property)
    finish(folder, start(folder, "run.yaml", "run_name=whole"))
    assert_same_run(folder / "runs" / "whole", run)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_restarted_head_ends_the_run_within_a_limit_and_it_resumes_the_same(
    folder: Path, ray_folder: str, record_property: Callable[[str, object], None]
) -> None:
    def head() -> psutil.Popen:
        command = [
            str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--port", str(port),
            "--num-cpus", "4", "--include-dashboard=false", "--disable-usage-stats",
            "--temp-dir", ray_folder,
        ]  # fmt: skip
        env = {**os.environ, **token}
        return psutil.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    from tests.services.jobs.head_node import TOKEN, free_port

    port = free_port()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    here = {"RAY_ADDRESS": f"127.0.0.1:{port}", **token}
    run = folder / "runs" / "hurt"
    first = head()
    try:
        wait_for_port(port)
        driver = start(folder, "run.yaml", "run_name=hurt", **here)
        wait_for_checkpoint(run, driver)
    finally:
        for process in [*first.children(recursive=True), first]:
            process.kill()
    assert driver.wait(timeout=300) != 0
    second = head()
    try:
        wait_for_port(port)
        resume(folder, run, record_property, **here)
    finally:
        for process in [*second.children(recursive=True), second]:
            process.kill()
    finish(folder, start(folder, "run.yaml", "run_name=whole"))
    assert_same_run(folder / "runs" / "whole", run)


def wait_for_port(port: int, seconds: float = 120) -> None:
    import socket

    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.2)
