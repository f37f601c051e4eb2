"""`max_staleness: 1`: the next rollouts are drawn while the update runs, and nothing gets lost by it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from callbacks_for_training import letters
from language_runs import LEARN, ROWS, assert_same_run, metrics_of, rollouts_of

from actors.rewards import CallbackError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

ARGS = {**LEARN, "num_train_epochs": 2, "num_turns": 1, "num_generations": 4, "rollout_buffer_size": 16}
ROUNDS = 6
"""Of four items each, twice twelve items."""


@pytest.fixture
def whole(make: Any, tmp_path: Path) -> Path:
    trainer = make("maac", ARGS, run_name="whole", max_staleness=1, **EVALUATED)
    trainer.train()
    trainer.shutdown()
    return tmp_path / "whole"


EVALUATED = {"eval_dataset": ROWS[:2], "importance_sampling_cap": 2.0}


def test_samples_are_one_update_old_and_every_item_is_learned_from_once(whole: Path) -> None:
    rows = rollouts_of(whole)
    for row in rows:
        assert row["staleness"] == row["round"] - 1 - row["weight_version"] == (0 if row["round"] == 1 else 1)
    seen = [(row["epoch"], row["item_idx"], row["generation_idx"]) for row in rows if row["agent_idx"] == 0]
    assert sorted(seen) == [(e, i, g) for e in range(2) for i in range(len(ROWS)) for g in range(4)]
    logs = [log for log in metrics_of(whole) if "staleness_mean" in log]
    assert [log["staleness_mean"] for log in logs] == [0.0] + [1.0] * (ROUNDS - 1)
    assert all(0 <= log["idle/engines"] <= 1 and 0 <= log["idle/learners"] <= 1 for log in logs)
    # Stale samples are where the weights matter; fresh ones weigh 1 but for rounding.
    weights = [log["importance_weight"] for log in logs]
    assert weights[0] == pytest.approx(1, abs=1e-3)
    assert np.abs(np.array(weights[1:]) - 1).max() > 1e-3


@pytest.mark.parametrize("stop_after", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(
    make: Any, tmp_path: Path, whole: Path, stop_after: int
) -> None:
    first = make("maac", ARGS, run_name="parts", max_staleness=1, **EVALUATED)
    first.train(max_updates=stop_after)
    first.shutdown()
    make("maac", ARGS, max_staleness=1, **EVALUATED).train(resume_from=tmp_path / "parts")
    assert_same_run(whole, tmp_path / "parts")


@pytest.mark.slow
def test_a_signal_waits_for_the_round_to_be_whole(make: Any, tmp_path: Path, whole: Path) -> None:
    calls = 0

    def interrupted(first: list[str], second: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 11:  # an item of the third round, collected during the second's update
            os.kill(os.getpid(), signal.SIGTERM)
        return letters(first, second)

    first = make("maac", ARGS, run_name="parts", max_staleness=1, **{**EVALUATED, "reward_func": interrupted})
    with pytest.raises(KeyboardInterrupt):
        first.train()
    first.shutdown()
    make("maac", ARGS, max_staleness=1, **EVALUATED).train(resume_from=tmp_path / "parts")
    assert_same_run(whole, tmp_path / "parts")


@pytest.mark.slow
def test_a_reward_that_raises_meanwhile_loses_no_update(make: Any, tmp_path: Path) -> None:
    calls = 0

    def fails(first: list[str], second: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 11:
            raise RuntimeError("judge is away")
        return letters(first, second)

    broken = make("maac", ARGS, run_name="run", max_staleness=1, reward_func=fails)
    with pytest.raises(CallbackError, match="judge is away") as caught:
        broken.train()
    assert any("2 finished update rounds are in" in note for note in caught.value.__notes__)
    broken.shutdown()
    make("maac", ARGS, max_staleness=1).train(resume_from=tmp_path / "run")
    seen = [(r["epoch"], r["item_idx"]) for r in rollouts_of(tmp_path / "run") if r["agent_idx"] == 0]
    assert sorted(set(seen)) == [(e, i) for e in range(2) for i in range(len(ROWS))]
    assert len(seen) == 2 * 4 * len(ROWS)
