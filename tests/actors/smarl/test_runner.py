"""What environment runners collect, as plain objects: on the ball grid, and on a team known in advance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from countdown import HOW, SEED, Tables, ball_grid, play, rows, runner
from numpy.typing import NDArray
from teams import assert_same

from actors.environments.ball_grid import BallGrid
from actors.rewards import CallbackError
from learners.smarl.random_streams import Purpose, stream


def test_collected_steps_are_what_the_environment_does_with_the_collected_actions() -> None:
    spec = ball_grid()
    whole = play(runner(spec), rows(spec, 3), [4, 9, 2, 0], 7)
    assert whole["observations"].shape == (8, 4, 3, 5)
    assert whole["actions"].shape == (7, 4, 3, 5)
    assert whole["rewards"].shape == (7, 4, 3)
    assert whole["terminated"].shape == whole["alive"].shape == (7, 4)
    assert whole["alive"].all()
    assert not whole["terminated"].any()  # seven steps are a time limit
    targets = whole["sequence_targets"].reshape(7, 4, 3)
    game = BallGrid(num_agents=3, num_envs=4, episode_steps=7)
    seeds = [int(stream(SEED, Purpose.ENVIRONMENT, episode).integers(2**31)) for episode in (4, 9, 2, 0)]
    now = game.reset(seeds)
    for t in range(7):
        np.testing.assert_array_equal(whole["observations"][t], now.individual)
        np.testing.assert_array_equal(whole["sequence_observations"].reshape(7, 4, 3, 5)[t], now.universal)
        np.testing.assert_array_equal(whole["sequence_masks"].reshape(7, 4, 3, 3)[t], now.target_mask)
        step = game.step(whole["actions"][t], targets[t])
        np.testing.assert_array_equal(whole["rewards"][t], step.rewards)
        mean = step.rewards.sum(1) / 3
        np.testing.assert_allclose(whole["sequence_rewards"].reshape(7, 4)[t], mean, rtol=1e-6)
        now = step.observation
    np.testing.assert_array_equal(whole["observations"][7], now.individual)


def test_the_same_episodes_are_played_in_pieces_or_at_once_and_again() -> None:
    spec = ball_grid()
    once = play(runner(spec), rows(spec, 3), range(4), 7)
    assert_same(play(runner(spec), rows(spec, 3), range(4), 1, 2, 4), once)
    again = runner(spec)
    play(again, rows(spec, 3, seed=5), [8, 9], 7)
    assert_same(play(again, rows(spec, 3), range(4), 7), once)
    split = runner(spec)
    split.start(range(4))
    chunk, *_ = split.collect(7, HOW, rows(spec, 3)[:1], rows(spec, 3)[1:])  # of two workers
    np.testing.assert_array_equal(chunk.actions, once["actions"])


def test_other_episodes_and_other_seeds_are_others() -> None:
    spec = ball_grid()
    once = play(runner(spec), rows(spec, 3), [0, 1], 7)
    assert not np.array_equal(once["observations"][:, 0], once["observations"][:, 1])
    for other in (
        play(runner(spec), rows(spec, 3), [2, 3], 7),
        play(runner(replace(spec, seed=12)), rows(spec, 3), [0, 1], 7),
    ):
        for name in ("observations", "actions", "sequence_targets"):
            assert not np.array_equal(other[name], once[name]), name


def test_copies_whose_episodes_end_sooner_are_not_alive_any_more() -> None:
    tables = Tables()
    ours = runner(tables.spec(), envs=6)
    ours.start(range(6))
    chunk, sequences, progress = ours.collect(50, HOW, rows(tables.spec(), 3))
    game = tables.made[0]
    lengths = game.lengths
    assert len(set(lengths)) > 1, "the test needs episodes of different lengths"
    assert len({int(s) % 2 for s in game.seeds}) == 2
    assert len(chunk) == progress.steps == lengths.max()  # it stops where the last one ends
    times = np.arange(len(chunk))[:, None]
    np.testing.assert_array_equal(chunk.alive, times < lengths)
    ends = np.where(chunk.alive, chunk.terminated, False)
    np.testing.assert_array_equal(ends, (times == lengths - 1) & (game.seeds % 2 == 0))
    assert progress.alive == lengths.sum()
    assert progress.over.all()
    np.testing.assert_array_equal(progress.lengths, lengths)
    for copy, length in enumerate(lengths.tolist()):
        for agent in range(3):
            returned = sum(10 * t + agent for t in range(1, length + 1))
            assert progress.returns[copy, agent] == returned
    assert sequences is not None
    assert len(sequences.rewards) == lengths.sum()
    assert np.isfinite(sequences.observations).all()
    steps = [10 * (t + 1) + 1 for t in range(len(chunk)) for length in lengths if t < length]
    np.testing.assert_allclose(sequences.rewards, steps)
    for t in range(len(chunk)):
        part = chunk.transitions(t)
        living = t < lengths
        assert len(part.rewards) == len(part.terminated) == living.sum()
        np.testing.assert_array_equal(part.observations[..., 1], t)
        np.testing.assert_array_equal(part.next_observations[..., 1], t + 1)
        np.testing.assert_array_equal(
            part.observations[:, 0, 2], np.sin(game.seeds[living]).astype(np.float32)
        )
        np.testing.assert_array_equal(
            part.terminated, (t == lengths - 1)[living] & (game.seeds % 2 == 0)[living]
        )


def test_progress_counts_over_pieces() -> None:
    tables = Tables()
    ours = runner(tables.spec(), envs=6)
    ours.start(range(6))
    lengths, steps, alive = tables.made[0].lengths, 0, 0
    for k in range(1, 6):
        if steps == lengths.max():
            break
        _, sequences, progress = ours.collect(1, HOW, rows(tables.spec(), 3))
        steps, alive = steps + progress.steps, alive + progress.alive
        np.testing.assert_array_equal(progress.lengths, np.minimum(lengths, k))
        np.testing.assert_array_equal(progress.over, lengths <= k)
        assert sequences is not None
        assert len(sequences.rewards) == progress.alive == (lengths >= k).sum()
    assert (steps, alive) == (lengths.max(), lengths.sum())


def test_fewer_episodes_than_copies_leave_the_rest_empty() -> None:
    spec = ball_grid()
    ours = runner(spec)
    ours.start([5, 6])
    chunk, sequences, progress = ours.collect(3, HOW, rows(spec, 3))
    np.testing.assert_array_equal(chunk.alive, np.tile([True, True, False, False], (3, 1)))
    assert progress.lengths.tolist() == [3, 3, 0, 0]
    assert progress.over.tolist() == [False, False, True, True]
    assert not progress.returns[2:].any()
    assert progress.alive == 6
    assert sequences is not None
    assert len(sequences.rewards) == 6
    assert len(chunk.transitions(0).rewards) == 2
    *_, progress = ours.collect(50, HOW, rows(spec, 3))
    assert progress.lengths.tolist() == [7, 7, 0, 0]


def test_an_episode_is_cut_off_after_the_most_steps_without_being_terminated() -> None:
    spec = ball_grid(max_steps=5)
    ours = runner(spec)
    ours.start(range(4))
    first, _, progress = ours.collect(3, HOW, rows(spec, 3))
    assert not progress.over.any()
    rest, _, progress = ours.collect(3, HOW, rows(spec, 3))
    assert (len(first), len(rest)) == (3, 2)
    assert progress.over.all()
    assert not rest.terminated.any()


def test_another_number_of_agents_takes_its_seats_at_the_next_start() -> None:
    spec = ball_grid()
    ours = runner(spec)
    ours.seat(5)
    assert_same(
        play(ours, rows(spec, 5), range(4), 7), play(runner(spec, agents=5), rows(spec, 5), range(4), 7)
    )


# --- R^seq ------------------------------------------------------------------------------------------------------------


def smallest(rewards: NDArray[np.float32]) -> NDArray[np.floating]:
    return rewards.min(1) - 3


def raising(rewards: NDArray[np.float32]) -> NDArray[np.floating]:
    raise KeyError("lost")


def per_agent(rewards: NDArray[np.float32]) -> NDArray[np.floating]:
    return rewards


def not_a_number(rewards: NDArray[np.float32]) -> NDArray[np.floating]:
    made = rewards.mean(1)
    made[2] = np.nan
    return made


def a_sum(rewards: NDArray[np.float32]) -> Any:
    return rewards.sum()


def test_r_seq_is_what_the_given_function_makes_of_the_rewards_of_living_steps() -> None:
    tables = Tables()
    ours = runner(tables.spec(sequence_reward=smallest), envs=6)
    ours.start(range(6))
    _, sequences, _ = ours.collect(50, HOW, rows(tables.spec(), 3))
    lengths = tables.made[0].lengths
    assert sequences is not None
    expected = [10 * (t + 1) - 3 for t in range(lengths.max()) for length in lengths if t < length]
    assert sequences.rewards.tolist() == expected


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (raising, r"sequence_reward raising raised KeyError for rewards of shape \(8, 3\): 'lost'"),
        (per_agent, r"per_agent must return 8 finite numbers, one for each step; .* array of shape \(8, 3\)"),
        (a_sum, r"a_sum must return 8 finite numbers, one for each step; .* array of shape \(\)"),
        (not_a_number, "not_a_number must return 8 finite numbers, .* it returned nan at step 2"),
    ],
)
def test_a_function_that_makes_no_r_seq_is_named(function: Any, told: str) -> None:
    spec = ball_grid(sequence_reward=function)
    ours = runner(spec)
    ours.start(range(4))
    with pytest.raises(CallbackError, match=told):
        ours.collect(2, HOW, rows(spec, 3))
