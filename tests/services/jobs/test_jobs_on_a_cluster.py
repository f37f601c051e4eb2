"""Runs as jobs of a real head node: they succeed, fail, are stopped without a trace, and go on where they stood."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.services.jobs.head_node import BIN, Head

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def episodes(run: Path) -> list[float]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["episode"] for line in path.read_text().splitlines()] if path.exists() else []


def wait_until_it_trains(run: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not episodes(run):
        assert time.monotonic() < end, f"{run} does not train"
        time.sleep(0.2)


def submitted(call: subprocess.CompletedProcess[str]) -> str:
    assert call.returncode == 0, call.stderr
    return call.stdout.splitlines()[0]


def test_a_job_is_followed_to_its_success_and_took_only_what_it_was_to_take(
    head: Head, project: Path, tmp_path: Path
) -> None:
    done = head.greenroom(
        "submit", "run.yaml", "run_name=whole", "--exclude", "notes.md", "--wait", "--follow", cwd=project
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job_id, *log = done.stdout.splitlines()
    assert job_id.startswith("raysubmit_")
    assert f"run folder: {tmp_path}/out/whole" in log
    assert "3 files" in done.stderr  # run.yaml, my_code.py, .gitignore
    assert episodes(tmp_path / "out" / "whole")[-1] == 8
    assert f"{job_id} has ended: SUCCEEDED" in done.stderr
    assert head.nothing_left() == []


@pytest.mark.parametrize("follow", [pytest.param("--follow", marks=pytest.mark.slow), "--no-follow"])
def test_a_failing_job_fails_the_command_which_tells_why(head: Head, project: Path, follow: str) -> None:
    (project / "notes.md").unlink()
    done = head.greenroom("submit", "run.yaml", "environment.name=my_code.py:broken", follow, cwd=project)
    assert done.returncode == 1
    told = done.stdout if follow == "--follow" else done.stderr
    assert "the ball has been eaten by a dog" in told
    assert "FAILED" in done.stderr


@pytest.mark.slow
def test_a_stopped_job_leaves_nothing_but_a_checkpoint_from_which_it_goes_on(
    head: Head, project: Path, tmp_path: Path
) -> None:
    (project / "notes.md").unlink()
    run = tmp_path / "out" / "stopped"
    long = ("submit", "run.yaml", "run_name=stopped", "args.num_episodes=1000000", "--no-wait")
    job_id = submitted(head.greenroom(*long, cwd=project))
    listed = head.greenroom("jobs", cwd=project).stdout.splitlines()
    assert listed[0].split() == ["ID", "STATUS", "STARTED", "SECONDS", "COMMAND"]
    assert any(line.startswith(job_id) and "greenroom train run.yaml" in line for line in listed)
    wait_until_it_trains(run)
    alive = {actor["class_name"] for actor in head.listed("actors") if actor["state"] == "ALIVE"}
    assert {"SMARLCoordinator", "DDPGWorker", "TeamRunner"} <= alive

    waited = head.greenroom("logs", job_id, "--follow", "--timeout", 1, cwd=project)
    assert waited.returncode == 1
    assert f"greenroom stop {job_id}" in waited.stderr
    stopped = head.greenroom("stop", job_id, "--wait", cwd=project)
    assert (stopped.returncode, stopped.stdout) == (0, f"{job_id} has ended: STOPPED\n")
    assert head.nothing_left() == []
    assert head.greenroom("logs", job_id, "--follow", cwd=project).returncode == 130
    log = head.greenroom("logs", job_id, cwd=project).stdout
    assert f"continue with `greenroom train --resume {run}`" in log
    assert "ended already: STOPPED" in head.greenroom("stop", job_id, cwd=project).stdout

    before = episodes(run)[-1]
    assert before < 1_000_000
    assert list((run / "checkpoints").glob("step_*/coordinator.safetensors"))
    changes = (f"args.num_episodes={before + 4:.0f}", "--resume", run)
    done = head.greenroom("submit", "run.yaml", *changes, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert episodes(run)[-1] == before + 4
    assert [b - a for a, b in zip(episodes(run), episodes(run)[1:], strict=False)] == [2] * (
        len(episodes(run)) - 1
    )


@pytest.mark.slow
def test_rays_own_command_submits_as_well_and_the_run_joins_the_jobs_cluster(
    head: Head, project: Path, tmp_path: Path
) -> None:
    # Ray's command leaves out what .gitignore names, and knows nothing of the token but what it is told.
    (project / ".gitignore").write_text("secret.txt\nruns/\nnotes.md\n")
    done = head.call(
        [
            str(BIN / "ray"), "job", "submit", "--working-dir", ".", "--", str(BIN / "greenroom"), "train", "run.yaml",
            "run_name=rays",
        ],
        project,
        RAY_AUTH_MODE="token",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    where = json.loads((tmp_path / "out" / "rays" / "cluster.json").read_text())["address"]
    jobs = [job for job in head.listed("jobs") if "run_name=rays" in (job["entrypoint"] or "")]
    actors = [a for a in head.listed("actors") if a["name"] == "coordinator-rays"]
    assert len(jobs) == len(actors) == 1
    # The head's first process picks its port by itself.
    listening = {c.laddr.port for c in head.process.children()[0].net_connections() if c.status == "LISTEN"}
    assert int(where.rpartition(":")[2]) in listening


@pytest.mark.slow
def test_a_job_that_does_not_end_in_time_is_killed_and_its_actors_end_with_it(
    head: Head, project: Path, tmp_path: Path
) -> None:
    (project / "notes.md").unlink()
    slow = ("environment.name=my_code.py:slow", "run_name=slow", "--grace", "1", "--no-wait")
    job_id = submitted(head.greenroom("submit", "run.yaml", *slow, cwd=project))
    end = time.monotonic() + 180
    while not any(a["class_name"] == "TeamRunner" and a["state"] == "ALIVE" for a in head.listed("actors")):
        assert time.monotonic() < end
    time.sleep(3)  # into the first steps, of which each takes two seconds
    stopped = head.greenroom("stop", job_id, "--wait", cwd=project)
    assert stopped.stdout == f"{job_id} has ended: STOPPED\n"
    assert not list((tmp_path / "out" / "slow").glob("checkpoints/step_*"))
    assert head.nothing_left(60) == []


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.5, 4, 7])
def test_a_job_stopped_while_it_starts_leaves_nothing(head: Head, project: Path, seconds: float) -> None:
    (project / "notes.md").unlink()
    job_id = submitted(
        head.greenroom("submit", "run.yaml", "args.num_episodes=1000000", "--no-wait", cwd=project)
    )
    time.sleep(seconds)
    stopped = head.greenroom("stop", job_id, "--wait", cwd=project)
    assert stopped.stdout == f"{job_id} has ended: STOPPED\n", stopped.stderr
    assert head.nothing_left(60) == []


@pytest.mark.slow
def test_language_models_train_as_a_job(head: Head, tmp_path: Path, small_model: Path) -> None:
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def f{i}():"}) + "\n" for i in range(4))
    )
    (folder / "scores.py").write_text(
        "def length(one, other):\n    return [float(len(a) > len(b)) for a, b in zip(one, other)]\n"
    )
    args = {
        "num_turns": 1, "num_train_epochs": 1, "num_generations": 2, "max_new_tokens": 8, "rollout_buffer_size": 8,
        "early_termination_threshold": None,
    }  # fmt: skip
    config = {
        "algorithm": "maac", "agent_model": str(small_model), "critic_model": str(small_model),
        "train_dataset": "rows.jsonl", "reward_func": "scores.py:length", "output_dir": str(tmp_path / "out"),
        "run_name": "words", "engine": {"backend": "transformers"}, "args": args,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = head.greenroom("submit", "run.yaml", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out" / "words" / "final" / "agent_1").is_dir()
    assert head.nothing_left() == []
