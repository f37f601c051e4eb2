"""How environment runners act: exploring, greedily in evaluation, at random, with a frozen target network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from countdown import HOW, POINTER, SEED, Tables, able, ball_grid, play, rows, runner
from teams import CONTINUOUS, assert_same

from actors.environments.team import TeamObservation
from actors.smarl.runner import EnvironmentSpec, RunnerSpec, TeamRunner
from learners.smarl.common_action import Exploration
from learners.smarl.random_streams import Purpose, stream


def greedy(spec: RunnerSpec, actors: np.ndarray, seen: TeamObservation, weights: int = 0) -> tuple[Any, Any]:
    """Outputs' argmax and the target network's likeliest targets."""
    networks = [torch.from_numpy(row)[None] for row in actors]
    outputs = torch.stack(
        [
            spec.networks.actor.forward(row, torch.from_numpy(seen.individual[:, agent])[None])[0]
            for agent, row in enumerate(networks)
        ],
        1,
    )
    assert spec.pointer is not None
    torch.manual_seed(weights)
    pointer = spec.pointer.build()
    targets, _ = pointer.decode(torch.from_numpy(seen.universal), torch.from_numpy(seen.target_mask))
    return outputs.argmax(-1).numpy(), targets.numpy()


def test_evaluation_takes_the_greedy_actions_of_each_agents_own_actor() -> None:
    tables = Tables()
    spec = tables.spec()
    ours, actors = runner(spec), rows(spec, 3)
    ours.evaluate([0], 3, actors)
    game = tables.made[-1]
    assert len(tables.made) == 2
    assert len(game.actions) == game.lengths[0]
    for seen, action, targets in zip(game.seen, game.actions, game.targets, strict=False):
        common, aimed = greedy(spec, actors, seen)
        np.testing.assert_array_equal(action.argmax(-1), common)
        np.testing.assert_array_equal(targets, aimed)


def test_evaluation_returns_the_sums_of_rewards_of_each_episode() -> None:
    tables = Tables()
    returns = runner(tables.spec()).evaluate(range(7), 3, rows(tables.spec(), 3))
    assert returns.shape == (7, 3)
    seeds = [int(stream(SEED, Purpose.EVALUATION, episode).integers(2**31)) for episode in range(7)]
    for episode, seed in enumerate(seeds):
        for agent in range(3):
            assert returns[episode, agent] == sum(10 * t + agent for t in range(1, 2 + seed % 4 + 1))


def test_evaluation_is_repeatable_however_episodes_are_dealt_and_disturbs_nothing() -> None:
    spec = ball_grid()
    actors = able(spec, 3)
    returns = runner(spec, envs=4).evaluate(range(6), 3, actors)
    np.testing.assert_array_equal(runner(spec, envs=1).evaluate(range(6), 3, actors), returns)
    np.testing.assert_array_equal(runner(spec, envs=9).evaluate(range(2, 6), 3, actors), returns[2:])
    assert len(np.unique(returns)) > 3
    assert not np.array_equal(runner(spec, weights=1).evaluate(range(6), 3, actors), returns)
    ours = runner(spec)
    ours.start(range(4))
    first, *_ = ours.collect(3, HOW, actors)
    np.testing.assert_array_equal(ours.evaluate(range(6), 3, actors), returns)
    second, *_ = ours.collect(4, HOW, actors)
    whole = play(runner(spec), actors, range(4), 7)
    np.testing.assert_array_equal(np.concatenate([first.actions, second.actions]), whole["actions"])


def test_at_another_number_of_agents_one_actor_plays_for_all() -> None:
    spec = ball_grid()
    one = able(spec, 1)
    returns = runner(spec).evaluate(range(3), 6, one)
    assert returns.shape == (3, 6)
    assert len(np.unique(returns)) > 3
    np.testing.assert_array_equal(returns, runner(spec, agents=6).evaluate(range(3), 6, np.repeat(one, 6, 0)))


def test_without_noise_and_at_a_low_temperature_collecting_is_greedy_for_common_actions() -> None:
    tables = Tables()
    spec = tables.spec()
    actors = rows(spec, 3)
    ours = runner(spec, envs=1)
    ours.start([0])
    ours.collect(50, Exploration(0, 0, 1e-6), actors)
    game = tables.made[0]
    for seen, action in zip(game.seen, game.actions, strict=False):
        np.testing.assert_array_equal(action.argmax(-1), greedy(spec, actors, seen)[0])


def test_targets_are_sampled_while_collecting_and_follow_the_temperature() -> None:
    def targets(temperature: float) -> np.ndarray:
        spec = ball_grid(
            target_temperature=temperature, environment=EnvironmentSpec("ball_grid", {"layouts": 1})
        )
        return play(runner(spec, agents=6), rows(spec, 6), range(4), 25)["sequence_targets"]

    tables = Tables()
    spec = tables.spec(target_temperature=1e-6)
    ours = runner(spec, envs=1)
    ours.start([0])
    ours.collect(50, HOW, rows(spec, 3))
    game = tables.made[0]
    for seen, aimed in zip(game.seen, game.targets, strict=False):
        np.testing.assert_array_equal(aimed, greedy(spec, rows(spec, 3), seen)[1])
    assert (targets(1.0) != targets(1e-6)).mean() > 0.1


def test_random_directions_take_no_notice_of_the_actors() -> None:
    spec = ball_grid(common_policy="random", environment=EnvironmentSpec("ball_grid", {"episode_steps": 50}))
    drawn = play(runner(spec), rows(spec, 3), range(4), 50)["actions"]
    np.testing.assert_array_equal(play(runner(spec), rows(spec, 3, 1), range(4), 50)["actions"], drawn)
    frequencies = drawn.reshape(-1, 5).mean(0)  # of 600
    np.testing.assert_allclose(frequencies, 0.2, atol=4 * np.sqrt(0.16 / 600))
    learned = play(runner(replace(spec, common_policy="learned")), rows(spec, 3), range(4), 50)["actions"]
    assert not np.array_equal(learned, drawn)
    assert np.ptp(learned.reshape(-1, 5).mean(0)) > 0.2


def test_random_targets_take_no_notice_of_the_target_network_and_keep_to_the_mask() -> None:
    tables = Tables()
    spec = tables.spec(target_policy="random")

    def drawn(weights: int, episodes: range) -> np.ndarray:
        made = runner(spec, agents=4, envs=30, weights=weights)
        return play(made, rows(spec, 4), episodes, 50)["sequence_targets"]

    targets = drawn(0, range(30))
    np.testing.assert_array_equal(drawn(1, range(30)), targets)
    for agent in range(4):
        counts = np.bincount(targets[:, agent], minlength=4)
        assert counts[agent] == 0
        others = np.delete(counts, agent) / len(targets)
        np.testing.assert_allclose(others, 1 / 3, atol=4 * np.sqrt(2 / 9 / len(targets)))


def test_random_policies_are_repeatable_in_evaluation() -> None:
    spec = ball_grid(common_policy="random", target_policy="random")
    returns = runner(spec).evaluate(range(4), 3, rows(spec, 3))
    assert returns.any()
    np.testing.assert_array_equal(runner(spec).evaluate(range(4), 3, rows(spec, 3)), returns)


def test_continuous_actions_stay_within_their_bounds_and_explore_by_the_noise_given() -> None:
    tables = Tables(CONTINUOUS)
    spec = tables.spec()
    calm, wild = runner(spec, envs=20), runner(spec, envs=20)
    for each in (calm, wild):
        each.start(range(20))
    actors = rows(spec, 3)
    still = calm.collect(2, Exploration(0, 0, 1), actors)[0].actions
    noisy = wild.collect(2, Exploration(0.3, 0, 1), actors)[0].actions
    observations = torch.from_numpy(tables.made[0].seen[0].individual)
    outputs = spec.networks.actor.forward(torch.from_numpy(actors), observations.transpose(0, 1)).tanh()
    np.testing.assert_allclose(still[0, ..., 0], outputs[..., 0].T, atol=1e-6)
    np.testing.assert_allclose(still[0, ..., 1], 2 + 2 * outputs[..., 1].T, atol=1e-5)
    for dimension, (low, high) in enumerate(zip(CONTINUOUS.low, CONTINUOUS.high, strict=True)):
        assert noisy[..., dimension].min() >= low
        assert noisy[..., dimension].max() <= high
    assert not np.isclose(noisy, still).all()


def test_without_individual_actions_there_is_nothing_for_the_memory() -> None:
    tables = Tables(has_targets=False)
    ours = runner(tables.spec())
    ours.start(range(4))
    _, sequences, progress = ours.collect(50, HOW, rows(tables.spec(), 3))
    assert sequences is None
    assert progress.over.all()
    assert not np.any(tables.made[0].targets)


# --- the frozen target network ----------------------------------------------------------------------------------------


def test_the_target_network_is_frozen_until_it_is_set() -> None:
    tables = Tables()
    spec = tables.spec(target_temperature=1e-3)

    def targets(of: TeamRunner) -> np.ndarray:
        return play(of, rows(spec, 5), range(4), 50)["sequence_targets"]

    ours = runner(spec, agents=5, weights=3)
    assert ours._pointer is not None
    before, old = ours._pointer.weights(), targets(ours)
    assert_same(ours._pointer.weights(), before)
    torch.manual_seed(4)
    weights = POINTER.build().weights()
    ours.set_target(weights)
    for array in weights.values():
        array[...] = 0  # they were copied
    new = targets(ours)
    np.testing.assert_array_equal(new, targets(runner(spec, agents=5, weights=4)))
    assert not np.array_equal(new, old)
