"""Foreign environments as teams: PettingZoo's, RLlib's and Gymnasium's, and hooks that do not fit."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from mpe2 import simple_spread_v3, simple_tag_v3
from pettingzoo import ParallelEnv
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from actors.environments.hooks import Hooks
from actors.environments.multi_agent import MultiAgentTeam
from actors.environments.team import CommonSpace, TeamEnvironmentError


class Counters(MultiAgentEnv):
    """Each agent counts its actions up; ends at 10 (terminated) or after `limit` steps (truncated).

    `spoil` is called with what a step would return, and may change it.
    """

    def __init__(self, agents: int = 2, limit: int = 4, action: Any = None, spoil: Any = None) -> None:
        super().__init__()
        self.possible_agents = self.agents = [f"counter_{i}" for i in range(agents)]
        self.observation_spaces = {a: spaces.Box(-100, 100, (2,), np.float32) for a in self.agents}
        action = action or spaces.Discrete(3, start=-1)
        self.action_spaces = dict.fromkeys(self.agents, action)
        self.limit, self.spoil, self.actions = limit, spoil, []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time, self.actions = 0, []
        start = int(self.np_random.integers(5))
        self.counts = {a: start + i for i, a in enumerate(self.possible_agents)}
        return self.observe(), {}

    def observe(self) -> dict[str, Any]:
        # In an order of its own: agents are told by their names.
        names = reversed(self.possible_agents)
        return {a: np.array([self.counts[a], self.time], np.float32) for a in names}

    def step(self, action_dict: dict[str, Any]) -> Any:
        self.time += 1
        self.actions.append(action_dict)
        for agent, action in action_dict.items():
            self.counts[agent] += int(np.sum(action))
        rewards = {a: float(c) for a, c in self.counts.items()}
        terminated = {"__all__": max(self.counts.values()) >= 10}
        result = (self.observe(), rewards, terminated, {"__all__": self.time >= self.limit}, {})
        if self.spoil is not None:
            self.spoil(self.time, *result)
        return result


class Pair(ParallelEnv):
    """Two agents, the second of which ends in step `second_ends`, the first in step 3."""

    metadata = {"name": "pair"}  # noqa: RUF012

    def __init__(self, second_ends: int = 3, first_space: Any = None) -> None:
        self.possible_agents, self.second_ends = ["a", "b"], second_ends
        self.first_space = first_space or spaces.Discrete(4)

    def observation_space(self, agent: str) -> Any:
        return self.first_space if agent == "a" else spaces.Discrete(4)

    def action_space(self, agent: str) -> Any:
        return spaces.Box(np.array([[-1.0, 0.0]], np.float32), np.array([[1.0, 0.5]], np.float32))

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.time, self.seed = ["a", "b"], 0, seed
        return {"a": 0, "b": 3}, {"a": {}, "b": {}}

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        for action in actions.values():
            assert action.shape == (1, 2)
            assert action.dtype == np.float32
            assert self.action_space("a").contains(action)
        names = self.agents
        ends = {"a": self.time >= 3, "b": self.time >= self.second_ends}
        self.agents = [a for a in names if not ends[a]]
        rewards = {a: float(actions[a].sum()) for a in names}
        terminated = {"a": ends["a"], "b": False}
        truncated = {"a": False, "b": ends["b"]}
        return {"a": 1, "b": 2}, rewards, terminated, truncated, {a: {} for a in names}


def choices(*numbers: list[int]) -> np.ndarray:
    return np.eye(3, dtype=np.float32)[np.array(numbers)]


NO_TARGETS = np.zeros((1, 2), np.int64)


def test_rllib_environment_step_by_step() -> None:
    env = MultiAgentTeam([Counters(limit=3), Counters(limit=99)], num_agents=2)
    assert env.space.common == CommonSpace(True, 3)
    assert not env.space.has_targets
    assert (env.space.individual_size, env.space.universal_size) == (2, 2)
    first = env.reset([0, 1])
    start = first.individual[:, :, 0]
    np.testing.assert_array_equal(start[:, 1], start[:, 0] + 1)
    np.testing.assert_array_equal(first.universal, first.individual)
    np.testing.assert_array_equal(first.target_mask, np.tile([[False, True], [True, False]], (2, 1, 1)))
    common = choices([2, 0], [1, 2])  # +1, -1 and 0, +1
    targets = np.zeros((2, 2), np.int64)
    totals, ended = start.copy(), np.zeros(2, bool)
    for number in range(1, 12):
        step = env.step(common, targets)
        totals += np.array([[1, -1], [0, 1]]) * ~ended[:, None]
        np.testing.assert_array_equal(step.observation.individual[:, :, 0], totals)
        np.testing.assert_array_equal(step.rewards, totals * ~ended[:, None])
        np.testing.assert_array_equal(step.truncated, [number >= 3, False])
        np.testing.assert_array_equal(step.terminated, [False, totals[1].max() >= 10])
        ended = step.terminated | step.truncated
        assert first.individual[0, 0, 0] == start[0, 0], "earlier observations must not change"
        if ended.all():
            break
    assert ended.all()
    again = env.reset([0, 1])
    np.testing.assert_array_equal(again.individual, first.individual)


def test_actions_reach_the_agent_they_are_for() -> None:
    inner = Counters(agents=3)
    env = MultiAgentTeam([inner], num_agents=3)
    env.reset([0])
    env.step(choices([0, 1, 2]), np.zeros((1, 3), np.int64))
    assert inner.actions == [{"counter_0": -1, "counter_1": 0, "counter_2": 1}]


def test_pettingzoo_spaces_rewards_and_a_mixed_end() -> None:
    env = MultiAgentTeam([Pair()], num_agents=2)
    assert env.space.common == CommonSpace(False, 2, (-1.0, 0.0), (1.0, 0.5))
    observation = env.reset([0])
    np.testing.assert_array_equal(observation.individual[0], [[1, 0, 0, 0], [0, 0, 0, 1]])
    common = np.array([[[0.25, 0.5], [-1, 0.125]]], np.float32)
    steps = [env.step(common, NO_TARGETS) for _ in range(4)]
    for step in steps[:3]:
        np.testing.assert_array_equal(step.rewards, [[0.75, -0.875]])
        np.testing.assert_array_equal(step.observation.universal[0], [[0, 1, 0, 0], [0, 0, 1, 0]])
    assert [bool(s.truncated[0]) for s in steps] == [False, False, True, True]
    assert not any(s.terminated[0] for s in steps)
    assert not steps[3].rewards.any()


def test_rounding_errors_above_a_bound_are_clipped_and_long_seeds_cut() -> None:
    inner = Pair()
    env = MultiAgentTeam([inner], num_agents=2)
    env.reset([2**40 + 5])
    assert inner.seed == 5
    step = env.step(np.array([[[1.000001, 0.5000001], [0, 0]]], np.float32), NO_TARGETS)
    np.testing.assert_array_equal(step.rewards, [[1.5, 0]])


def test_real_mpe2_without_hooks() -> None:
    env = MultiAgentTeam([simple_spread_v3.parallel_env(N=2, max_cycles=2) for _ in range(2)], num_agents=2)
    reference = simple_spread_v3.parallel_env(N=2, max_cycles=2)
    expected, _ = reference.reset(seed=9)
    observation = env.reset([4, 9])
    np.testing.assert_array_equal(observation.individual[1], list(expected.values()))
    for number in (1, 2):
        expected, rewards, *_ = reference.step({"agent_0": 2, "agent_1": 3})
        step = env.step(np.tile(np.eye(5, dtype=np.float32)[[2, 3]], (2, 1, 1)), np.zeros((2, 2), np.int64))
        np.testing.assert_array_equal(step.observation.universal[1], list(expected.values()))
        np.testing.assert_allclose(step.rewards[1], [rewards["agent_0"], rewards["agent_1"]], rtol=1e-6)
        assert step.truncated.tolist() == [number == 2] * 2


def test_a_single_agent_of_gymnasium() -> None:
    env = MultiAgentTeam([gymnasium.make("Pendulum-v1"), gymnasium.make("Pendulum-v1")], num_agents=1)
    assert env.space.common == CommonSpace(False, 1, (-2.0,), (2.0,))
    reference = gymnasium.make("Pendulum-v1")
    expected, _ = reference.reset(seed=6)
    observation = env.reset([5, 6])
    assert observation.target_mask.all()
    np.testing.assert_array_equal(observation.individual[1, 0], expected)
    expected, reward, *_ = reference.step(np.array([1.5], np.float32))
    step = env.step(np.array([[[0.5]], [[1.5]]], np.float32), np.zeros((2, 1), np.int64))
    np.testing.assert_array_equal(step.observation.individual[1, 0], expected)
    np.testing.assert_allclose(step.rewards[1], reward, rtol=1e-6)


def test_hooks_split_observations_and_compose_actions() -> None:
    inner = Counters(agents=3, action=spaces.Discrete(7))
    hooks = Hooks(
        individual_observation=lambda own, i, everyone: [own[1]],
        universal_observation=lambda own, i, everyone: [own[0], i, sum(o[0] for o in everyone)],
        compose_action=lambda common, target, own, i: int(common[0] * 2) + target + i * 0,
        common_space=CommonSpace(False, 1, (0.0,), (1.0,)),
        target_mask=lambda everyone: np.roll(np.eye(3, dtype=bool), 1, axis=1),
    )
    env = MultiAgentTeam([inner], num_agents=3, hooks=hooks)
    assert (env.space.individual_size, env.space.universal_size) == (1, 3)
    assert env.space.has_targets
    observation = env.reset([0])
    total = 3 * observation.universal[0, 0, 0] + 3
    np.testing.assert_array_equal(observation.universal[0, :, 1:], [[0, total], [1, total], [2, total]])
    np.testing.assert_array_equal(observation.target_mask[0].argmax(1), [1, 2, 0])
    step = env.step(np.array([[[0.0], [0.5], [1.0]]], np.float32), np.array([[1, 2, 0]]))
    assert inner.actions == [{"counter_0": 1, "counter_1": 3, "counter_2": 2}]
    np.testing.assert_array_equal(step.observation.individual, [[[1], [1], [1]]])


def test_hooks_stand_in_for_unequal_observations() -> None:
    names = {"individual_observation", "universal_observation"}
    hooks = Hooks(**dict.fromkeys(names, lambda own, i, everyone: own[:4]))
    env = MultiAgentTeam([simple_tag_v3.parallel_env()], num_agents=4, hooks=hooks)
    assert env.reset([0]).individual.shape == (1, 4, 4)


def build(inner: Any, num_agents: int = 2, **hooks: Any) -> MultiAgentTeam:
    return MultiAgentTeam([inner], num_agents=num_agents, hooks=Hooks(**hooks))


def view(size: Any) -> Any:
    return lambda own, i, everyone: np.zeros(size(i))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: build(simple_tag_v3.parallel_env(), 4),
            r"'adversary_0' and 'agent_0' have different observation spaces, .*\(16,\).*\(14,\).*hooks individual_obs",
        ),
        (
            lambda: build(Counters(), 3),
            r"has 2 agents \['counter_0', 'counter_1'\], but 3 are asked for",
        ),
        (
            lambda: build(Counters(action=spaces.MultiDiscrete([2, 2]))),
            r"action space MultiDiscrete.* neither Discrete nor a Box of floats; .*compose_action",
        ),
        (
            lambda: build(Counters(action=spaces.Box(-np.inf, 1, (1,)))),
            r"action space Box\(-inf, 1\.0.* finite bounds.*compose_action",
        ),
        (
            lambda: build(Pair(first_space=spaces.Discrete(5))),
            r"'a' and 'b' have different observation spaces, Discrete\(5\) and Discrete\(4\)",
        ),
        (lambda: build(simple_spread_v3.env(), 3), r"in turn; use its parallel form"),
        (lambda: build(object()), r"a object is no environment"),
        (
            lambda: build(Counters(), individual_observation=view(lambda i: (2, 3))),
            r"hook individual_observation returned shape \(2, 3\) for agent 'counter_0'",
        ),
        (
            lambda: build(Counters(), universal_observation=view(lambda i: 2 + i)),
            r"hook universal_observation returned shape \(3,\) for agent 'counter_1'; .* of 2 numbers",
        ),
        (
            lambda: build(Counters(), target_mask=lambda o: np.ones((2, 3), bool)).reset([0]),
            r"hook target_mask returned bool of shape \(2, 3\); bool of shape \(2, 2\)",
        ),
        (
            lambda: build(Counters(), common_space=CommonSpace(True, 2)),
            r"common_space needs the hook compose_action",
        ),
    ],
)
def test_what_does_not_fit_is_said(make: Any, message: str) -> None:
    with pytest.raises(TeamEnvironmentError, match=message):
        make()


def test_unflattenable_observations() -> None:
    inner = Counters()
    inner.observation_spaces = dict.fromkeys(inner.possible_agents, spaces.Text(5))
    with pytest.raises(TeamEnvironmentError, match="a Text space cannot be flattened; give the hooks"):
        build(inner)


def drop_agent(time: int, observations: Any, *rest: Any) -> None:
    if time == 2:
        del observations["counter_1"]


def drop_reward(time: int, observations: Any, rewards: Any, *rest: Any) -> None:
    if time == 2:
        del rewards["counter_0"]


def end_one(time: int, observations: Any, rewards: Any, terminated: Any, *rest: Any) -> None:
    terminated["counter_1"] = time == 2


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (Counters(spoil=drop_agent), r"copy 0: agent 'counter_1' has no observation; all agents must"),
        (Counters(spoil=drop_reward), r"copy 0: agent 'counter_0' has no reward"),
        (Counters(spoil=end_one), r"copy 0: agent 'counter_1' leaves the episode but 'counter_0' does not"),
        (Pair(second_ends=2), r"copy 0: agent 'b' leaves the episode but 'a' does not"),
    ],
)
def test_agents_that_leave_early_are_an_error_in_that_step(inner: Any, message: str) -> None:
    env = build(inner)
    env.reset([0])
    common = np.zeros((1, 2, env.space.common.size), np.float32)
    env.step(common, NO_TARGETS)
    with pytest.raises(TeamEnvironmentError, match=message):
        env.step(common, NO_TARGETS)
