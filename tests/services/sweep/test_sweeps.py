"""Whole sweeps with real trials: they share the cluster, stop early, copy one another, and leave no actor behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import yaml
from ray._private.state import actors
from safetensors.numpy import load_file
from sweep_runs import SMARL, logs, run_sweep, write

from services.bundles import PlacementError
from services.checkpoint import CheckpointStore
from services.config import SMARLRunConfig, load_config
from services.smarl.trainer import SMARLTrainer
from services.sweep.sweep import Sweep, SweepError, load_sweep
from services.trainer import trainer_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("ray_cluster")]

PAY = "environment.options.pay"
SPACE: dict[str, Any] = {
    "learning_rate": {"loguniform": [1e-4, 1e-2]},
    "sync_interval": {"int": [2, 4]},
    "hidden_sizes": {"choice": [[8], [8, 8]]},
}


def living() -> set[str]:
    return {actor_id for actor_id, actor in actors().items() if actor["State"] not in ("DEAD",)}


def assert_all_ended(before: set[str]) -> None:
    """No actor is left that was not there before."""
    end = time.monotonic() + 60
    while living() != before:
        assert time.monotonic() < end, "actors were left behind"
        time.sleep(0.1)


def final_state(run: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint."""
    checkpoint = CheckpointStore(run / "checkpoints", None).latest()
    assert checkpoint is not None
    return {
        f"{path.name}/{name}": array
        for path in sorted(checkpoint.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


def config_of(run: Path, overrides: list[str]) -> SMARLRunConfig:
    config = load_config(run / "config.yaml", overrides)
    assert isinstance(config, SMARLRunConfig)
    return config


def overlapping(runs: list[Path]) -> int:
    """Most of `runs` that ever were being trained at a time."""
    spans = [(entries[0]["time"], entries[-1]["time"]) for entries in map(logs, runs)]
    return max(sum(start <= moment <= end for start, end in spans) for moment, _ in spans)


def test_a_random_sweep_trains_as_many_trials_side_by_side_as_fit_and_leaves_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = living()
    # A CPU for each of coordinator, worker, runner and the trial itself: two trials at a time fit into 8.
    folder, outcomes = run_sweep(
        tmp_path, {"space": SPACE, "num_samples": 3, "report_interval": 2}, workers={"cpus_per_actor": 1.0}
    )
    assert_all_ended(before)
    assert len(outcomes) == 3
    for name, outcome in outcomes.items():
        assert (outcome.reports, outcome.score, outcome.error) == (3, 4.0, None)
        assert 1e-4 <= outcome.values["learning_rate"] <= 1e-2
        assert outcome.values["sync_interval"] in (2, 3, 4)
        assert outcome.values["hidden_sizes"] in ([8], [8, 8])
        run = yaml.safe_load((folder.runs / name / "config.yaml").read_text())
        assert run["args"]["learning_rate"] == outcome.values["learning_rate"]
    assert len({outcome.values["learning_rate"] for outcome in outcomes.values()}) == 3
    assert overlapping([folder.runs / name for name in outcomes]) <= 2
    assert (folder.path / "reward_by_parameter.png").stat().st_size > 5000
    table = capsys.readouterr().out
    assert "3/3 (3 TERMINATED)" in table
    assert "learning_rate" in table

    best = load_config(folder.path / "best.yaml", ["args.num_episodes=1"])
    assert (best.output_dir, best.run_name) == (str(tmp_path), "sweep-best")
    with trainer_of(best) as trainer:
        assert len(logs(trainer.train())) == 1


@pytest.mark.slow
def test_asha_stops_bad_trials_early_and_the_best_one_is_written_down(tmp_path: Path) -> None:
    folder, outcomes = run_sweep(
        tmp_path,
        {
            "space": {PAY: {"grid": [3, 1]}},
            "num_samples": 1,
            "scheduler": "asha",
            "reduction_factor": 2,
            "max_concurrent": 1,
        },
    )
    reports = {outcome.values[PAY]: outcome.reports for outcome in outcomes.values()}
    assert reports == {3: 6, 1: 1}
    assert len(logs(folder.runs / next(iter(outcomes)))) == 6
    best = yaml.safe_load((folder.path / "best.yaml").read_text())
    assert best["environment"]["options"] == {"pay": 3}
    assert "sweep" not in best


@pytest.mark.slow
def test_pbt_copies_the_checkpoint_of_a_good_trial_and_goes_on_from_it(tmp_path: Path) -> None:
    meet = tmp_path / "meet"
    meet.mkdir()
    options = {"pay": 0, "meet": str(meet), "others": 2, "pace": 0.25}
    folder, outcomes = run_sweep(
        tmp_path,
        {
            "space": {PAY: {"uniform": [1, 5]}},
            "num_samples": 2,
            "scheduler": "pbt",
            "perturbation_interval": 3,
            "quantile_fraction": 0.5,
        },
        environment={**SMARL["environment"], "options": options},
        args={"num_episodes": 12},
    )
    assert [outcome.reports for outcome in outcomes.values()] == [12, 12]
    (exploit,) = [json.loads(line) for line in (folder.tune / "pbt_global.txt").read_text().splitlines()]
    copier, donor = (list(outcomes)[int(tag.partition("_")[0])] for tag in exploit[:2])
    assert exploit[-1][PAY] == outcomes[copier].values[PAY] != outcomes[donor].values[PAY]
    results = [json.loads(line) for line in (folder.tune / copier / "result.json").read_text().splitlines()]
    assert results[0]["return_mean"] < 4 * outcomes[donor].values[PAY]
    (copied,) = [
        later["training_iteration"] - 1
        for before, later in pairwise(results)
        if before["training_iteration"] >= later["training_iteration"]
    ]
    assert copied in (3, 6, 9)

    # The same by hand: the good trial's first rounds, then the rest with the values of the trial that copied it.
    by_hand = [f"output_dir={tmp_path}", "run_name=by_hand"]
    with SMARLTrainer.from_config(config_of(folder.runs / donor, by_hand)) as trainer:
        trainer.train(max_updates=copied)
    with SMARLTrainer.from_config(config_of(folder.runs / copier, by_hand)) as trainer:
        trainer.train(resume_from=tmp_path / "by_hand")
    ours, theirs = final_state(folder.runs / copier), final_state(tmp_path / "by_hand")
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    assert any((array != final_state(folder.runs / donor)[name]).any() for name, array in ours.items())


@pytest.mark.slow
def test_a_trial_whose_process_was_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    before = living()
    killed: list[float] = []

    def kill() -> None:
        end = time.monotonic() + 240
        results: list[dict[str, Any]] = []
        while len(results) < 5 and time.monotonic() < end:
            time.sleep(0.1)
            files = list((tmp_path / "sweep" / "tune").glob("trial_*/result.json"))
            results = [json.loads(line) for line in files[0].read_text().splitlines()] if files else []
        killed.append(time.time())
        os.kill(results[-1]["pid"], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    folder, outcomes = run_sweep(
        tmp_path,
        {"space": {"discount": {"uniform": [0, 1]}}, "num_samples": 1, "checkpoint_interval": 2},
        environment={**SMARL["environment"], "options": {"pay": 1, "pace": 0.5}},
        args={"num_episodes": 12},
    )
    thread.join()
    ((trial, outcome),) = outcomes.items()
    assert (outcome.reports, outcome.error) == (12, None)
    entries = logs(folder.runs / trial)
    assert [entry["episode"] for entry in entries] == list(range(1, 13))
    assert sum(entry["time"] < killed[0] for entry in entries) >= 4
    assert entries[-1]["time"] > killed[0]
    assert_all_ended(before)


@pytest.mark.slow
def test_a_trial_that_fails_does_not_end_the_others_and_none_at_all_is_an_error(tmp_path: Path) -> None:
    sweep = {"space": {PAY: {"grid": [1, "much"]}}, "num_samples": 1, "max_failures": 0}
    folder, outcomes = run_sweep(tmp_path, sweep, args={"num_episodes": 1})
    fine, broken = outcomes.values()
    assert (fine.error, fine.score) == (None, 4.0)
    assert "could not convert string to float: 'much'" in str(broken.error)
    assert yaml.safe_load((folder.path / "best.yaml").read_text())["environment"]["options"] == {"pay": 1}
    sweep["space"] = {PAY: {"choice": ["much"]}}
    with pytest.raises(SweepError, match=r"(?s)no trial has reported anything.*could not convert string"):
        run_sweep(tmp_path, sweep, run_name="other")


def test_a_sweep_whose_trials_can_never_fit_is_refused_before_it_begins(tmp_path: Path) -> None:
    path = write(
        tmp_path, {"space": {"workers.num_env_runners": {"int": [1, 9]}}}, workers={"cpus_per_actor": 1}
    )
    with pytest.raises(PlacementError, match="12 CPU needed in all, 8 there"):
        Sweep.create(*load_sweep(path))
    assert not (tmp_path / "sweep").exists()
    assert ray.is_initialized()
