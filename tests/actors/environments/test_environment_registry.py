"""Names and functions, and the environments they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from mpe2 import simple_spread_v3
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.tune.registry import ENV_CREATOR, _global_registry, register_env

from actors.environments.ball_grid import BallGrid
from actors.environments.hooks import Hooks
from actors.environments.registry import is_reference, make_environment
from actors.environments.team import TeamEnvironmentError


class Still(MultiAgentEnv):
    """Nothing happens; observations are the `level` of its config."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.level = config["level"]
        self.worker = config.worker_index
        self.possible_agents = self.agents = [f"still_{i}" for i in range(config["num_agents"])]
        self.observation_spaces = {a: spaces.Box(0, 9, (1,)) for a in self.agents}
        self.action_spaces = {a: spaces.Box(-1, 1, (1,)) for a in self.agents}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {a: np.array([self.level], np.float32) for a in self.agents}, {}


@pytest.fixture
def registered() -> Iterator[str]:
    register_env("still_water", Still)
    yield "still_water"
    _global_registry.unregister(ENV_CREATOR, "still_water")


def test_built_in_names_and_their_options() -> None:
    grid = make_environment("ball_grid", {"episode_steps": 2}, num_agents=3, num_envs=4)
    assert isinstance(grid.inner, BallGrid)
    assert grid.reset([0, 1, 2, 3]).individual.shape == (4, 3, 5)
    actions = grid.inner.best_actions()
    assert not grid.step(*actions).truncated.any()
    assert grid.step(*grid.inner.best_actions()).truncated.all()
    spread = make_environment("simple_spread", {"continuous_actions": False}, num_agents=2, num_envs=1)
    assert spread.space.common.discrete
    assert spread.reset([0]).universal.shape == (1, 2, 6)


def test_gymnasium_names() -> None:
    env = make_environment("gymnasium:CartPole-v1", {"max_episode_steps": 2}, num_agents=1, num_envs=2)
    assert env.space.common.discrete
    assert not env.space.has_targets
    env.reset([0, 1])
    action = np.eye(2, dtype=np.float32)[[[0], [1]]]
    targets = np.zeros((2, 1), np.int64)
    assert not env.step(action, targets).truncated.any()
    assert env.step(action, targets).truncated.all()
    with pytest.raises(ValueError, match="has a single agent, but num_agents is 3"):
        make_environment("gymnasium:CartPole-v1", {}, num_agents=3, num_envs=1)
    with pytest.raises(gymnasium.error.Error, match="CartPole"):
        make_environment("gymnasium:CartPool-v1", {}, num_agents=1, num_envs=1)


def test_names_registered_with_rllib(registered: str) -> None:
    env = make_environment(registered, {"level": 5}, num_agents=3, num_envs=2)
    np.testing.assert_array_equal(env.reset([0, 1]).individual, np.full((2, 3, 1), 5))
    with pytest.raises(ValueError, match="did you mean 'still_water'"):
        make_environment("stil_water", {}, num_agents=3, num_envs=2)


def test_a_class_in_rllibs_form() -> None:
    env = make_environment(Still, {"level": 2}, num_agents=2, num_envs=1)
    np.testing.assert_array_equal(env.reset([0]).universal, [[[2], [2]]])


def test_functions_get_what_they_name() -> None:
    def spread(num_agents: int, cycles: int) -> Any:
        return simple_spread_v3.parallel_env(N=num_agents, max_cycles=cycles)

    env = make_environment(spread, {"cycles": 3}, num_agents=2, num_envs=3)
    assert env.reset([0, 1, 2]).individual.shape == (3, 2, 12)

    def grid(num_agents: int, num_envs: int, size: int) -> Any:
        return BallGrid(num_agents=num_agents, num_envs=num_envs, size=size)

    env = make_environment(grid, {"size": 3}, num_agents=9, num_envs=2)
    assert env.reset([0, 1]).individual.shape == (2, 9, 5)
    # mpe2's own function takes no num_agents; its option must agree.
    env = make_environment(simple_spread_v3.parallel_env, {"N": 4}, num_agents=4, num_envs=1)
    with pytest.raises(TeamEnvironmentError, match=r"has 4 agents .* but 3 are asked for"):
        make_environment(simple_spread_v3.parallel_env, {"N": 4}, num_agents=3, num_envs=1)


def test_hooks_go_to_foreign_environments_only() -> None:
    hooks = Hooks(universal_observation=lambda own, i, everyone: own[:2])
    env = make_environment("simple_spread", {"continuous_actions": False}, hooks, num_agents=2, num_envs=1)
    assert (env.space.individual_size, env.space.universal_size) == (12, 2)
    with pytest.raises(ValueError, match="hooks have no effect on ball_grid"):
        make_environment("ball_grid", {}, hooks, num_agents=2, num_envs=1)
    with pytest.raises(ValueError, match="hooks have no effect on the team environment BallGrid"):
        make_environment(lambda: BallGrid(num_agents=2, num_envs=1), {}, hooks, num_agents=2, num_envs=1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ball_gird", {}, "no environment 'ball_gird'; did you mean 'ball_grid'"),
        ("zzz", {}, "no environment 'zzz'; Known are ball_grid, simple_spread"),
        ("ball_grid", {"layout": 3}, "ball_grid has no option 'layout'; did you mean 'layouts'"),
        ("ball_grid", {"num_agents": 3}, "ball_grid has no option 'num_agents'"),
        ("simple_spread", {"max_cycle": 3}, "did you mean 'max_cycles'"),
        ("package.module:function", {}, "pass the function itself"),
    ],
)
def test_unknown_names_and_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_environment(name, options, num_agents=2, num_envs=1)


def test_team_environments_of_another_size_are_refused() -> None:
    with pytest.raises(TeamEnvironmentError, match="made 1 copies with 2 agents each instead of 4 with 3"):
        make_environment(lambda: BallGrid(num_agents=2, num_envs=1), {}, num_agents=3, num_envs=4)


def test_references_are_told_from_names() -> None:
    assert is_reference("module:function")
    assert is_reference("folder/file.py:make")
    assert not is_reference("ball_grid")
    assert not is_reference("gymnasium:Pendulum-v1")
