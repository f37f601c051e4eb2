"""Copies of runs in other file systems: whole or not there, and good to go on from."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import fsspec
import pytest

from services import SMARLTrainer
from services.checkpoint import CheckpointError, CheckpointStore, TrainerState
from services.config import ConfigError, SMARLRunConfig, parse_config
from services.run_folder import RunFolder, RunFolderError
from services.storage import RunCopy, checkpoints_of, leave_final_copy


def a_run(folder: Path, storage: str, **settings: Any) -> tuple[RunFolder, SMARLRunConfig]:
    config = parse_config(
        {
            "algorithm": "smarl", "environment": "ball_grid", "agents": 2, "output_dir": str(folder / "runs"),
            "storage_path": storage, **settings,
        }
    )  # fmt: skip
    assert isinstance(config, SMARLRunConfig)
    run = RunFolder.create(config.output_dir, "one", "smarl")
    run.write_config("algorithm: smarl\n")
    run.metrics_file.write_text('{"step": 1}\n')
    return run, config


def fill(text: str) -> Any:
    def write(folder: Path) -> None:
        (folder / "agent_0").mkdir()
        (folder / "agent_0" / "weights").write_text(text)

    return write


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return str(tmp_path / "store")
    fsspec.filesystem("memory").store.clear()
    return "memory://store"


def test_the_copy_follows_the_checkpoints_and_is_fetched_again(tmp_path: Path, storage: str) -> None:
    run, config = a_run(tmp_path, storage, keep_checkpoints=2)
    checkpoints = checkpoints_of(run, config)
    for step in (1, 2, 3):
        checkpoints.write(TrainerState(reward_evaluations=step), fill(f"weights {step}"))
    copy = RunCopy(f"{storage}/one")
    assert copy._checkpoints() == {"step_00000002", "step_00000003"}
    fetched = copy.fetch(tmp_path / "elsewhere")
    newest = CheckpointStore(fetched.checkpoints, None).latest()
    assert newest is not None
    assert newest.name == "step_00000003"
    assert (newest / "agent_0" / "weights").read_text() == "weights 3"
    assert fetched.config_file.read_text() == run.config_file.read_text()
    assert fetched.metrics_file.read_text() == run.metrics_file.read_text()
    with pytest.raises(RunFolderError, match="exists already: continue it with"):
        copy.fetch(tmp_path / "elsewhere")


def test_a_copy_that_is_half_there_is_not_taken_for_whole(tmp_path: Path, storage: str) -> None:
    run, config = a_run(tmp_path, storage)
    checkpoints = checkpoints_of(run, config)
    checkpoints.write(TrainerState(reward_evaluations=1), fill("one"))
    copy = RunCopy(f"{storage}/one")
    copy._copy(run.config_file, f"{copy._root}/checkpoints/step_00000002/agent_0/weights")
    fetched = copy.fetch(tmp_path / "elsewhere")
    assert [path.name for path in fetched.checkpoints.iterdir()] == ["step_00000001"]
    with pytest.raises(RunFolderError, match="holds no run with a complete checkpoint"):
        RunCopy(f"{storage}/other").fetch(tmp_path / "elsewhere")


def test_a_store_that_goes_away_costs_no_checkpoint_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, config = a_run(tmp_path, str(tmp_path / "store"))
    checkpoints = checkpoints_of(run, config)
    checkpoints.write(TrainerState(reward_evaluations=1), fill("one"))
    (tmp_path / "store" / "one").rename(tmp_path / "away")
    (tmp_path / "store" / "one").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        path = checkpoints.write(TrainerState(reward_evaluations=2), fill("two"))
    assert path.is_dir()
    assert "is not up to date, the next checkpoint tries again" in caplog.text
    with pytest.raises(CheckpointError, match=r"the run is whole in .* but its copy"):
        leave_final_copy(run, config)
    (tmp_path / "store" / "one").unlink()
    leave_final_copy(run, config)
    assert RunCopy(f"{tmp_path}/store/one")._checkpoints() == {"step_00000001", "step_00000002"}


def test_a_store_that_cannot_be_used_is_told_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for number, (storage, message) in enumerate(
        {
            str(tmp_path / "file"): "storage_path: nothing can be written to .*file/one",
            "nonsense://bucket": "storage_path: nonsense://bucket/one cannot be opened: .*nonsense",
        }.items()
    ):
        run, config = a_run(tmp_path / str(number), storage)
        with pytest.raises(ConfigError, match=message):
            checkpoints_of(run, config)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.slow
def test_a_run_goes_on_from_its_copy_as_if_nothing_had_happened(tmp_path: Path) -> None:
    settings = {
        "algorithm": "smarl", "environment": "ball_grid", "agents": 2, "checkpoint_interval": 0,
        "storage_path": str(tmp_path / "store"), "output_dir": str(tmp_path / "runs"),
        "args": {
            "num_episodes": 8, "max_episode_steps": 10, "batch_size": 16, "hidden_sizes": [16],
            "target_hidden_size": 16, "target_interval": 4, "sync_interval": 4, "eval_interval": 0,
        },
        "workers": {"envs_per_runner": 2, "rollout_steps": 5, "cpus_per_actor": 0.1},
    }  # fmt: skip

    def trainer(name: str) -> SMARLTrainer:
        config = parse_config({**settings, "run_name": name})
        assert isinstance(config, SMARLRunConfig)
        return SMARLTrainer.from_config(config)

    with trainer("whole") as whole:
        whole.train()
    with trainer("parts") as first:
        first.train(max_updates=2)
    fetched = RunCopy(str(tmp_path / "store" / "parts")).fetch(tmp_path / "elsewhere")
    with trainer("parts") as second:
        second.train(resume_from=fetched.path)

    def returns(run: Path) -> list[float]:
        entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [entry["return_mean"] for entry in entries]

    assert returns(fetched.path) == returns(tmp_path / "runs" / "whole")
    assert RunCopy(str(tmp_path / "store" / "parts"))._checkpoints()
