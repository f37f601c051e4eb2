"""simple_spread as a team: what the hooks hand on, against mpe2's own world, and where its forces lead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actors.environments.checked import CheckedTeam
from actors.environments.multi_agent import MultiAgentTeam
from actors.environments.simple_spread import simple_spread, spread_hooks
from actors.environments.team import CommonSpace, FloatArray

SENSITIVITY, DT = 5.0, 0.1
"""mpe2: a full force changes the velocity by 0.5 a step."""


def world(env: MultiAgentTeam, copy: int = 0) -> Any:
    adapter: Any = env._copies[copy]
    return adapter._environment.unwrapped.world


def put(env: MultiAgentTeam, agents: list[list[float]], landmarks: list[list[float]]) -> None:
    """Place everything, at rest, and let agents see it."""
    for entity, position in zip(world(env).entities, agents + landmarks, strict=True):
        entity.state.p_pos = np.array(position, float)
        entity.state.p_vel = np.zeros(2)
    adapter: Any = env._copies[0]
    raw = adapter._environment.aec_env.unwrapped
    env._raw[0] = [raw.observe(agent) for agent in adapter.agents]


@pytest.mark.parametrize("num_agents", [1, 2, 3, 6])
@pytest.mark.parametrize("continuous", [True, False])
def test_observations_hold_what_the_world_holds(num_agents: int, continuous: bool) -> None:
    env = simple_spread(num_agents=num_agents, num_envs=2, continuous_actions=continuous)
    checked, rng = CheckedTeam(env), np.random.default_rng(0)
    observation = checked.reset([3, 4])
    assert (env.space.individual_size, env.space.universal_size) == (8, 6)
    assert not env.space.targets_are_agents
    assert env.space.has_targets
    for _ in range(5):
        assert observation.target_mask.all()
        for copy in range(2):
            state = world(env, copy)
            positions = np.array([a.state.p_pos for a in state.agents])
            landmarks = np.array([m.state.p_pos for m in state.landmarks])
            for i, agent in enumerate(state.agents):
                position, velocity = agent.state.p_pos, agent.state.p_vel
                np.testing.assert_allclose(
                    observation.universal[copy, i], [*position, *velocity, *landmarks[i]], atol=1e-6
                )
                others = sorted(
                    (np.delete(positions, i, 0) - position).tolist(), key=lambda v: v[0] ** 2 + v[1] ** 2
                )
                nearest = min((landmarks - position).tolist(), key=lambda v: v[0] ** 2 + v[1] ** 2)
                expected = [*velocity, *position, *nearest, *(others[0] if others else [0, 0])]
                np.testing.assert_allclose(observation.individual[copy, i], expected, atol=1e-6)
        targets = rng.integers(num_agents, size=(2, num_agents))
        if continuous:
            common = rng.uniform(-1, 1, (2, num_agents, 2)).astype(np.float32)
        else:
            common = np.eye(5, dtype=np.float32)[rng.integers(5, size=(2, num_agents))]
        observation = checked.step(common, targets).observation


@pytest.mark.parametrize(
    ("common", "target", "force"),
    [
        ([1, 0], 0, [0.6, 0.8]),  # towards the landmark at (0.6, 0.8)
        ([-0.5, 0], 0, [-0.3, -0.4]),
        ([0, 1], 0, [-0.8, 0.6]),  # left of the way there
        ([0, -1], 0, [0.8, -0.6]),
        ([1, 0], 1, [-1, 0]),
        ([0, 0.5], 1, [0, -0.5]),
        ([1, 1], 0, [-0.2 / 1.4, 1]),  # (-0.2, 1.4), as strong as mpe2 can
        ([0, 0], 0, [0, 0]),
        ([1, 1], 2, [0, 0]),  # it stands on that landmark
    ],
)
def test_continuous_forces_by_hand(common: list[float], target: int, force: list[float]) -> None:
    env = simple_spread(num_agents=3, num_envs=1)
    assert env.space.common == CommonSpace(False, 2, (-1.0, -1.0), (1.0, 1.0))
    env.reset([0])
    put(env, [[0, 0], [5, 5], [-5, 5]], [[0.6, 0.8], [-2, 0], [0, 0]])
    actions = np.zeros((1, 3, 2), np.float32)
    actions[0, 0] = common
    step = env.step(actions, np.array([[target, 0, 0]]))
    velocity = step.observation.universal[0, :, 2:4]
    np.testing.assert_allclose(velocity[0], np.array(force) * SENSITIVITY * DT, atol=1e-6)
    np.testing.assert_array_equal(velocity[1:], 0)


@pytest.mark.parametrize(
    ("choice", "target", "force"),
    [
        (0, 0, [0, 0]),
        (1, 0, [0, 1]),  # towards (0.6, 0.8): up is nearer than right
        (2, 0, [0, -1]),
        (3, 0, [-1, 0]),
        (4, 0, [1, 0]),
        (1, 1, [-1, 0]),
        (3, 1, [0, -1]),
        (1, 2, [0, 0]),
    ],
)
def test_discrete_moves_by_hand(choice: int, target: int, force: list[float]) -> None:
    env = simple_spread(num_agents=3, num_envs=1, continuous_actions=False)
    assert env.space.common == CommonSpace(True, 5)
    env.reset([0])
    put(env, [[0, 0], [5, 5], [-5, 5]], [[0.6, 0.8], [-2, 0], [0, 0]])
    common = np.eye(5, dtype=np.float32)[[[choice, 0, 0]]]
    step = env.step(common, np.array([[target, 0, 0]]))
    np.testing.assert_allclose(
        step.observation.universal[0, 0, 2:4], np.array(force) * SENSITIVITY * DT, atol=1e-6
    )


def drive(actions: FloatArray, targets: np.ndarray, **options: Any) -> float:
    """Mean reward of the last 10 of 25 steps with the same action throughout."""
    env = simple_spread(num_agents=3, num_envs=4, **options)
    env.reset([10, 11, 12, 13])
    rewards = []
    for _ in range(25):
        step = env.step(np.tile(actions, (4, 3, 1)), np.tile(targets, (4, 1)))
        rewards.append(step.rewards.mean())
    assert step.truncated.all()
    assert not step.terminated.any()
    env.close()
    return float(np.mean(rewards[-10:]))


@pytest.mark.parametrize("continuous", [True, False])
def test_towards_different_landmarks_pays_more_than_staying_or_crowding(continuous: bool) -> None:
    options = {"continuous_actions": continuous, "local_ratio": 0.0}
    none, towards = (
        (np.zeros(2, np.float32), np.array([0.5, 0], np.float32))
        if continuous
        else np.eye(5, dtype=np.float32)[:2]
    )
    own, same = np.array([0, 1, 2]), np.array([0, 0, 0])
    covering = drive(towards, own, **options)
    assert covering > drive(none, own, **options) + 0.2
    assert covering > drive(towards, same, **options) + 0.2


def test_options_reach_mpe2() -> None:
    env = simple_spread(num_agents=2, num_envs=1, max_cycles=3, local_ratio=1.0, continuous_actions=False)
    env.reset([0])
    put(env, [[0, 0], [0.1, 0]], [[1, 1], [-1, 1]])
    common = np.eye(5, dtype=np.float32)[[[0, 0]]]
    steps = [env.step(common, np.array([[0, 1]])) for _ in range(3)]
    np.testing.assert_array_equal(steps[0].rewards, [[-1, -1]])  # they touch; nothing else counts
    assert [bool(step.truncated[0]) for step in steps] == [False, False, True]


def test_seeds_decide() -> None:
    env = simple_spread(num_agents=2, num_envs=2)
    first, second = env.reset([1, 2]).universal, env.reset([2, 1]).universal
    np.testing.assert_array_equal(first, second[::-1])
    assert np.abs(first[0] - first[1]).max() > 0.1


def test_the_hooks_do_not_depend_on_the_number_of_agents() -> None:
    assert spread_hooks(2, True).common_space == spread_hooks(9, True).common_space
