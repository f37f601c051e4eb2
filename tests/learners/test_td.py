"""TD targets, errors and advantages against hand computations and their defining properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from learners.samples import Completion, Sample
from learners.td import next_turn_index, normalise_advantages, td_errors, td_targets

EMPTY = Completion(
    prompt_ids=np.array([1], dtype=np.int32),
    token_ids=np.array([], dtype=np.int32),
    logprobs=np.array([], dtype=np.float32),
    text="",
    finish_reason="stop",
    weight_version=0,
)


def sample(agent: int, item: int, generation: int, turn: int, final: bool) -> Sample:
    return Sample(
        agent_idx=agent,
        item_idx=item,
        turn_idx=turn,
        generation_idx=generation,
        prompt="",
        completion=EMPTY,
        reward=0.0,
        is_final_turn=final,
        expected_return=0.0,
    )


@st.composite
def shuffled_rollouts(draw: st.DrawFn) -> list[Sample]:
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    agents = draw(st.integers(1, 3))
    samples = [
        sample(agent, rollout // 2, rollout % 2, turn, turn + 1 == turns)
        for agent in range(agents)
        for rollout, turns in enumerate(lengths)
        for turn in range(turns)
    ]
    return draw(st.permutations(samples))


@given(shuffled_rollouts())
def test_following_the_index_walks_every_rollout_to_its_end(samples: list[Sample]) -> None:
    following = next_turn_index(samples)
    visited = 0
    for start, first in enumerate(samples):
        if first.turn_idx > 0:
            continue
        here, turn = start, 0
        while here != -1:
            now = samples[here]
            assert now.turn_idx == turn
            assert (now.agent_idx, now.item_idx, now.generation_idx) == (
                first.agent_idx,
                first.item_idx,
                first.generation_idx,
            )
            visited += 1
            turn += 1
            here = int(following[here])
    assert visited == len(samples)


def test_a_hole_in_a_rollout_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"agent 1, item 4, generation 0: turn 0 is not the final one.*turn 1"
    ):
        next_turn_index([sample(1, 4, 0, 0, False), sample(1, 4, 0, 2, True)])


def test_the_same_turn_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"samples 0 and 1 are both agent 0, item 2, generation 1, turn 0"):
        next_turn_index([sample(0, 2, 1, 0, True), sample(0, 2, 1, 0, True)])


def test_targets_bootstrap_from_the_next_turn_and_end_with_the_reward() -> None:
    rewards, values = [1.0, -0.5, 2.0], [0.25, 4.0, -8.0]
    targets = td_targets(rewards, values, np.array([1, 2, -1]), discount=0.5)
    assert targets.dtype == np.float32
    assert_array_equal(targets, np.array([1.0 + 0.5 * 4.0, -0.5 + 0.5 * -8.0, 2.0], dtype=np.float32))
    assert_array_equal(td_errors(targets, values), np.array([2.75, -8.5, 10.0], dtype=np.float32))


def test_without_discounting_of_the_future_targets_are_the_rewards() -> None:
    assert_array_equal(td_targets([1, 2], [9, 9], np.array([1, -1]), 0.0), [1, 2])


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="must share one length"):
        td_targets([1.0], [1.0, 2.0], np.array([-1, -1]), 1.0)


def test_each_group_is_standardised_by_its_own_population_deviation() -> None:
    errors = np.array([1.0, 10.0, 3.0, 40.0, 5.0, 7.0], dtype=np.float32)
    advantages = normalise_advantages(errors, [[0, 2, 4], [1, 3], [5]])
    third = np.sqrt(8.0 / 3.0)  # deviations of 1, 3, 5 from 3: -2, 0, 2
    assert_allclose(advantages, [-2 / third, -1.0, 0.0, 1.0, 2 / third, 7.0], rtol=1e-6)
    assert_array_equal(errors, [1.0, 10.0, 3.0, 40.0, 5.0, 7.0])


def test_equal_errors_become_zeros_instead_of_dividing_by_zero() -> None:
    assert_array_equal(normalise_advantages([0.3, 0.3, 0.3], [[0, 1, 2]]), np.zeros(3))


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=30),
    st.integers(1, 5),
)
def test_standardised_groups_have_mean_zero_and_deviation_one_at_most(
    errors: list[float], group_size: int
) -> None:
    groups = [list(range(i, min(i + group_size, len(errors)))) for i in range(0, len(errors), group_size)]
    advantages = normalise_advantages(errors, groups)
    for group in groups:
        members, raw = advantages[group].astype(np.float64), np.array(errors, dtype=np.float32)[group]
        if len(group) == 1:
            assert_array_equal(members, raw)
            continue
        spread = raw.std(dtype=np.float64)
        if spread > 1e-3 * (1 + np.abs(raw).max()):
            assert abs(members.mean()) < 1e-3
            assert abs(members.std() - 1) < 1e-3
            assert (np.diff(members[np.argsort(raw)]) >= 0).all()
        assert members.std() < 1 + 1e-3
