"""The ball game by hand, against a slow loop, and by what it pays to know."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.environments.ball_grid import STAY, BallGrid, oracle_actions
from actors.environments.checked import CheckedTeam
from actors.environments.team import FloatArray, IntArray, TeamObservation

UP, DOWN, LEFT, RIGHT = range(4)
STEPS = {UP: (0, 1), DOWN: (0, -1), LEFT: (-1, 0), RIGHT: (1, 0)}


def random_targets(mask: np.ndarray, rng: np.random.Generator) -> IntArray:
    return np.where(mask, rng.random(mask.shape), -1).argmax(-1)


def moves(choices: np.ndarray) -> FloatArray:
    return np.eye(5, dtype=np.float32)[choices]


def mean_reward(num_agents: int, *, know_direction: bool, know_target: bool) -> float:
    """Of the team, per step; 64 copies for 8 episodes of 25 steps."""
    copies, rng, rewards = 64, np.random.default_rng(7), []
    env = BallGrid(num_agents=num_agents, num_envs=copies)
    for episode in range(8):
        observation = env.reset(range(episode * copies, (episode + 1) * copies))
        ended = False
        while not ended:
            common, targets = oracle_actions(env)
            if not know_direction:
                common = moves(rng.integers(5, size=(copies, num_agents)))
            if not know_target:
                targets = random_targets(observation.target_mask, rng)
            step = env.step(common, targets)
            rewards.append(step.rewards.sum(1))
            observation, ended = step.observation, bool(step.truncated.all())
    assert len(rewards) == 8 * 25
    return float(np.mean(rewards))


def test_both_halves_of_the_action_are_worth_learning() -> None:
    """Knowing the direction but not the target, what a system without a target network can do at best, costs half."""
    values = {
        n: {
            (direction, target): mean_reward(n, know_direction=direction, know_target=target)
            for direction in (True, False)
            for target in (True, False)
        }
        for n in (3, 8)
    }
    for n in (3, 8):
        assert values[n][True, True] == 1.0
        assert values[n][True, False] < 0.6
        assert values[n][False, True] < 0.4
        assert values[n][False, False] < 0.2
        assert values[n][False, False] < values[n][False, True] < values[n][True, False]
    assert values[8][True, False] < values[3][True, False] - 0.01


def placed(positions: list[tuple[int, int]], holder: int, goal: tuple[int, int]) -> BallGrid:
    """A single copy of size 5 in a state of our choosing."""
    env = BallGrid(num_agents=len(positions), num_envs=1, layouts=1, goals=1)
    env.reset([0])
    env._place(np.array([positions]), np.array([goal]))
    env._holder = np.array([holder])
    return env


def test_hand_computed_throws() -> None:
    """Holder 0 at (1, 1), goal at (4, 0): right and down lead closer.  Distances 1, 2 and 8 pay 1, 6/7 and 0."""
    positions = [(1, 1), (4, 1), (3, 1), (0, 4)]
    for move, target, reward in (
        (RIGHT, 1, 1.0),
        (DOWN, 2, 6 / 7),
        (RIGHT, 3, 0.0),
        (UP, 1, 0.0),
        (LEFT, 1, 0.0),
        (STAY, 1, 0.0),
    ):
        env = placed(positions, holder=0, goal=(4, 0))
        before = env._observe()
        common = moves(np.array([[move, STAY, STAY, STAY]]))
        step = env.step(common, np.array([[target, 0, 0, 0]]))
        np.testing.assert_allclose(step.rewards, [[reward, 0, 0, 0]], rtol=1e-6)
        holder = step.observation.universal[0, :, 2].argmax()
        if move in (RIGHT, DOWN):
            assert holder == target
        else:
            assert holder == 0
            np.testing.assert_array_equal(before.universal, step.observation.universal)


def test_a_holder_on_the_goal_may_only_stay_and_equal_distances_pay_one() -> None:
    positions = [(2, 2), (2, 4), (0, 2)]
    for move, reward in ((STAY, 1.0), (UP, 0.0), (LEFT, 0.0)):
        env = placed(positions, holder=0, goal=(2, 2))
        step = env.step(moves(np.array([[move, UP, UP]])), np.array([[2, 0, 0]]))
        np.testing.assert_array_equal(step.rewards, [[reward, 0, 0]])


def test_hand_computed_observations_and_mask() -> None:
    """Arm 1 at (4, 1) holds the ball; the goal is (0, 4); all coordinates are divided by 4."""
    observation = placed([(1, 1), (4, 1), (2, 3)], holder=1, goal=(0, 4))._observe()
    np.testing.assert_allclose(
        observation.universal[0],
        [[0.25, 0.25, 0, 0, 1], [1, 0.25, 1, 0, 1], [0.5, 0.75, 0, 0, 1]],
    )
    np.testing.assert_allclose(
        observation.individual[0],
        [[0, -0.25, 0.75, 0.75, 0], [1, -1, 0.75, 0, 0], [0, -0.5, 0.25, 0.5, -0.5]],
    )
    np.testing.assert_array_equal(observation.target_mask[0], [[0, 1, 0], [1, 0, 1], [0, 1, 0]])


def slow_step(
    universal: np.ndarray, size: int, common: np.ndarray, targets: np.ndarray
) -> tuple[list[float], int]:
    """The rules once more, for one copy, from what everyone sees: rewards and the next holder."""
    cells = [tuple(round(float(v) * (size - 1)) for v in (e[0], e[1], e[3], e[4])) for e in universal]
    holder = next(i for i, e in enumerate(universal) if e[2] == 1)

    def distance(x: int, y: int) -> int:
        return abs(x - cells[0][2]) + abs(y - cells[0][3])

    x, y = cells[holder][:2]
    move = int(np.argmax(common[holder]))
    after = distance(x, y) if move == STAY else distance(x + STEPS[move][0], y + STEPS[move][1])
    right = after == 0 if move == STAY else after < distance(x, y)
    rewards = [0.0] * len(cells)
    if not right:
        return rewards, holder
    others = {i: distance(*cell[:2]) for i, cell in enumerate(cells) if i != holder}
    most, least = max(others.values()), min(others.values())
    target = int(targets[holder])
    rewards[holder] = 1.0 if most == least else (most - others[target]) / (most - least)
    return rewards, target


def check_invariants(observation: TeamObservation, num_agents: int, size: int) -> None:
    holds = observation.universal[..., 2]
    np.testing.assert_array_equal(holds.sum(1), 1)
    assert ((holds == 0) | (holds == 1)).all()
    np.testing.assert_array_equal(observation.individual[..., 0], holds)
    mask = observation.target_mask
    for copy, holder in enumerate(holds.argmax(1)):
        assert not mask[copy].diagonal().any()
        assert mask[copy, holder].sum() == num_agents - 1
        others = np.arange(num_agents) != holder
        assert mask[copy, others, holder].all()
        assert (mask[copy, others].sum(1) == 1).all()
        cells = {tuple(row) for row in observation.universal[copy, :, :2].tolist()}
        assert len(cells) == num_agents
    assert observation.universal.min() >= 0
    assert observation.universal.max() <= 1


@settings(max_examples=60, deadline=None)
@given(
    num_agents=st.integers(2, 50),
    goals=st.integers(1, 64),
    seed=st.integers(0, 2**63 - 1),
    helped=st.booleans(),
)
def test_follows_the_rules_for_any_number_of_agents(
    num_agents: int, goals: int, seed: int, helped: bool
) -> None:
    size, copies, rng = 8, 3, np.random.default_rng(seed)
    env = BallGrid(num_agents=num_agents, num_envs=copies, size=size, goals=goals, episode_steps=6)
    observation = env.reset([seed, seed + 1, seed // 2])
    check_invariants(observation, num_agents, size)
    for number in range(6):
        common = oracle_actions(env)[0] if helped else moves(rng.integers(5, size=(copies, num_agents)))
        targets = random_targets(observation.target_mask, rng)
        step = env.step(common, targets)
        for copy in range(copies):
            rewards, holder = slow_step(observation.universal[copy], size, common[copy], targets[copy])
            np.testing.assert_allclose(step.rewards[copy], rewards, rtol=1e-6)
            assert step.observation.universal[copy, :, 2].argmax() == holder
        assert step.rewards.min() >= 0
        assert step.rewards.max() <= 1
        assert not step.terminated.any()
        assert step.truncated.all() == step.truncated.any() == (number == 5)
        observation = step.observation
        check_invariants(observation, num_agents, size)


def test_a_copy_does_not_depend_on_the_copies_beside_it() -> None:
    seeds = [5, 2**62 + 1, 5, 9]
    many = BallGrid(num_agents=4, num_envs=4)
    alone = [BallGrid(num_agents=4, num_envs=1) for _ in seeds]
    together = many.reset(seeds).universal
    apart = [env.reset([seed]).universal for env, seed in zip(alone, seeds, strict=True)]
    holders = set()
    for _ in range(25):
        np.testing.assert_array_equal(together, np.concatenate(apart))
        np.testing.assert_array_equal(together[0], together[2])
        holders.add(tuple(together[..., 2].argmax(1)))
        together = many.step(*many.best_actions()).observation.universal
        apart = [env.step(*env.best_actions()).observation.universal for env in alone]
    assert len(holders) > 3


def test_seeds_spread_over_layouts_holders_and_goals_evenly() -> None:
    """1024 seeds, 4 layouts x 4 holders x 4 goals: 16 each, and a chi-square below its 99.99 % quantile, 120."""
    env = BallGrid(num_agents=4, num_envs=1024, layouts=4)
    universal = env.reset(range(1024)).universal
    _, counts = np.unique(universal.reshape(1024, -1), axis=0, return_counts=True)
    assert len(counts) == 64
    assert (np.square(counts - 16) / 16).sum() < 120


def test_observations_repeat_so_that_a_memory_can_compare_them() -> None:
    """At most layouts x holders x goals are different."""
    env = BallGrid(num_agents=3, num_envs=256, layouts=2, goals=2)
    seen = [env.reset(range(256)).universal]
    seen += [env.step(*env.best_actions()).observation.universal for _ in range(24)]
    assert len(np.unique(np.concatenate(seen).reshape(-1, 15), axis=0)) == 2 * 3 * 2


def test_an_ended_copy_tolerates_anything_and_stays_as_it_is() -> None:
    env = CheckedTeam(BallGrid(num_agents=3, num_envs=2, episode_steps=2))
    env.reset([0, 1])
    for _ in range(2):
        last = env.step(*oracle_actions(env))
    assert last.truncated.all()
    after = env.step(np.full((2, 3, 5), np.nan, np.float32), np.full((2, 3), 99))
    np.testing.assert_array_equal(after.observation.universal, last.observation.universal)
    assert not after.rewards.any()
    after = env.step(*oracle_actions(env))
    np.testing.assert_array_equal(after.observation.universal, last.observation.universal)
    assert not after.rewards.any()
    assert after.truncated.all()
    env.reset([0, 1])
    again = env.step(*oracle_actions(env))
    assert not again.truncated.any()
    np.testing.assert_array_equal(again.rewards.sum(1), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_agents": 26}, r"num_agents is 26; it must be at least 2 and at most 25, the cells"),
        ({"num_agents": 1}, r"num_agents is 1; it must be at least 2"),
        ({"num_agents": 3, "goals": 26}, r"goals is 26"),
        ({"num_agents": 3, "size": 1}, r"size is 1"),
        ({"num_agents": 3, "episode_steps": 0}, r"episode_steps is 0"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BallGrid(num_envs=1, **arguments)
