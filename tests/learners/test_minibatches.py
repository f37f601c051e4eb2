"""Mini-batches partition the samples, keep turns apart and depend on nothing but their inputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.minibatches import group_by_turn, plan_minibatches

TURNS = st.lists(st.integers(0, 4), max_size=40)


@given(TURNS)
def test_groups_partition_the_samples_by_turn_in_turn_order(turns: list[int]) -> None:
    groups = group_by_turn(turns)
    assert sorted(i for group in groups for i in group) == list(range(len(turns)))
    kinds = [{turns[i] for i in group} for group in groups]
    assert kinds == [{turn} for turn in sorted(set(turns))]
    assert all(group == sorted(group) for group in groups)


@given(TURNS, st.integers(1, 9), st.one_of(st.none(), st.integers(0, 99)))
def test_minibatches_partition_the_samples_and_never_mix_turns(
    turns: list[int], size: int, seed: int | None
) -> None:
    rng = None if seed is None else np.random.default_rng(seed)
    plan = plan_minibatches(turns, size, rng)
    assert sorted(i for minibatch in plan for i in minibatch) == list(range(len(turns)))
    turn_of = [[turns[i] for i in minibatch] for minibatch in plan]
    assert all(len(set(kind)) == 1 for kind in turn_of)
    order = [kind[0] for kind in turn_of]
    assert order == sorted(order)
    for turn in set(turns):
        sizes = [len(kind) for kind in turn_of if kind[0] == turn]
        members = turns.count(turn)
        assert sizes == [size] * (members // size) + [members % size] * (members % size > 0)


def test_without_a_generator_the_samples_keep_their_order() -> None:
    assert plan_minibatches([0, 1, 0, 1, 0], 2) == [[0, 2], [4], [1, 3]]


def test_a_generator_shuffles_reproducibly() -> None:
    turns = [0] * 20
    first, again, other = (plan_minibatches(turns, 20, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert first[0] != list(range(20))


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="train_batch_size must be at least 1, got 0"):
        plan_minibatches([0], 0)
