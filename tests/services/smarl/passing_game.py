"""One small game as an RLlib and as a PettingZoo environment, with the hooks that say what is individual in it.

Agents pass a ball: whoever holds it chooses whom to throw it to and how hard; strength 1 arrives and earns 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from actors.environments.team import CommonSpace

STEPS = 8


class _Game:
    def __init__(self, num_agents: int) -> None:
        self.names = [f"player_{i}" for i in range(num_agents)]
        self.holder = self.time = 0

    def observations(self) -> dict[str, np.ndarray]:
        return {
            name: np.array([i == self.holder, self.time / STEPS], np.float32)
            for i, name in enumerate(self.names)
        }

    def play(self, actions: dict[str, Any]) -> tuple[dict[str, float], bool]:
        to, strength = (int(part) for part in actions[self.names[self.holder]])
        arrived = float(strength == 1)
        if arrived:
            self.holder = to
        self.time += 1
        return dict.fromkeys(self.names, arrived), self.time >= STEPS


OBSERVATION = spaces.Box(0.0, 1.0, (2,), np.float32)


def _action(num_agents: int) -> spaces.Space[Any]:
    return spaces.MultiDiscrete([num_agents, 3])


class RLlibGame(MultiAgentEnv):
    def __init__(self, num_agents: int) -> None:
        super().__init__()
        self.game = _Game(num_agents)
        self.possible_agents = self.agents = list(self.game.names)
        self.observation_spaces = dict.fromkeys(self.agents, OBSERVATION)
        self.action_spaces = dict.fromkeys(self.agents, _action(num_agents))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.game = _Game(len(self.possible_agents))
        return self.game.observations(), {}

    def step(self, action_dict: dict[str, Any]) -> Any:
        rewards, over = self.game.play(action_dict)
        return self.game.observations(), rewards, {"__all__": False}, {"__all__": over}, {}


class PettingZooGame(ParallelEnv):  # type: ignore[misc]
    metadata = {"name": "passing_game"}  # noqa: RUF012

    def __init__(self, num_agents: int) -> None:
        self.game = _Game(num_agents)
        self.possible_agents = list(self.game.names)
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return OBSERVATION

    def action_space(self, agent: str) -> Any:
        return _action(len(self.possible_agents))

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.game, self.agents = _Game(len(self.possible_agents)), list(self.possible_agents)
        return self.game.observations(), {key: {} for key in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        rewards, over = self.game.play(actions)
        ended = dict.fromkeys(self.agents, over)
        nobody = dict.fromkeys(self.agents, False)
        result = (self.game.observations(), rewards, nobody, ended, {key: {} for key in self.agents})
        if over:
            self.agents = []
        return result


def rllib(num_agents: int) -> RLlibGame:
    return RLlibGame(num_agents)


def pettingzoo(num_agents: int) -> PettingZooGame:
    return PettingZooGame(num_agents)


def throw(common: np.ndarray, target: int, observation: np.ndarray, agent: int) -> np.ndarray:
    """How hard is the same skill for all; to whom depends on who throws."""
    return np.array([target, common.argmax()])


def strengths() -> CommonSpace:
    return CommonSpace(True, 3)
