"""One copy of a foreign environment, seen alike whether it is PettingZoo's, RLlib's or a single agent's of Gymnasium.

Owns the differences between their interfaces.  It must not know of teams, hooks or other copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from actors.environments.team import TeamEnvironmentError

ONLY_AGENT = "agent_0"
"""What the agent of an environment is called that has but one and no name for it."""

# Many an environment hands its seed to numpy's RandomState, which takes no more than 32 bits.
_SEED_BITS = 31

Agents = dict[Any, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What a step returned, by agent."""

    observations: Agents
    rewards: Agents
    terminated: Agents
    truncated: Agents
    """The last two may hold `__all__` too, which then speaks for every agent."""


class Adapter(Protocol):
    """One copy.  Agents keep their order."""

    agents: list[Any]

    def observation_space(self, agent: Any) -> Any: ...

    def action_space(self, agent: Any) -> Any: ...

    def reset(self, seed: int) -> Agents: ...

    def step(self, actions: Agents) -> Result: ...

    def close(self) -> None: ...


class PettingZooAdapter:
    """A PettingZoo parallel environment."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.agents = list(environment.possible_agents)

    def observation_space(self, agent: Any) -> Any:
        return self._environment.observation_space(agent)

    def action_space(self, agent: Any) -> Any:
        return self._environment.action_space(agent)

    def reset(self, seed: int) -> Agents:
        observations, _ = self._environment.reset(seed=short_seed(seed))
        return dict(observations)

    def step(self, actions: Agents) -> Result:
        return Result(*self._environment.step(actions)[:4])

    def close(self) -> None:
        self._environment.close()


class RLlibAdapter(PettingZooAdapter):
    """An RLlib `MultiAgentEnv`."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.agents = list(environment.possible_agents or environment.agents)

    def observation_space(self, agent: Any) -> Any:
        return self._environment.get_observation_space(agent)

    def action_space(self, agent: Any) -> Any:
        return self._environment.get_action_space(agent)


class GymnasiumAdapter:
    """A Gymnasium environment: a team of one."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self.agents: list[Any] = [ONLY_AGENT]

    def observation_space(self, agent: Any) -> Any:
        return self._environment.observation_space

    def action_space(self, agent: Any) -> Any:
        return self._environment.action_space

    def reset(self, seed: int) -> Agents:
        observation, _ = self._environment.reset(seed=short_seed(seed))
        return {ONLY_AGENT: observation}

    def step(self, actions: Agents) -> Result:
        values = self._environment.step(actions[ONLY_AGENT])[:4]
        return Result(*({ONLY_AGENT: value} for value in values))

    def close(self) -> None:
        self._environment.close()


def short_seed(seed: int) -> int:
    """The part of `seed` that is handed on."""
    return seed & (1 << _SEED_BITS) - 1


def adapt(environment: Any) -> Adapter:
    """The adapter for `environment`, told by the methods it has.

    Raises:
        TeamEnvironmentError: none fits.
    """
    if hasattr(environment, "agent_iter"):
        raise TeamEnvironmentError(
            f"{type(environment).__name__} lets agents act in turn; use its parallel form, "
            "pettingzoo.utils.conversions.aec_to_parallel"
        )
    if callable(getattr(environment, "get_action_space", None)):
        return RLlibAdapter(environment)
    if callable(getattr(environment, "action_space", None)) and hasattr(environment, "possible_agents"):
        return PettingZooAdapter(environment)
    if all(hasattr(environment, name) for name in ("reset", "step", "action_space", "observation_space")):
        return GymnasiumAdapter(environment)
    raise TeamEnvironmentError(
        f"a {type(environment).__name__} is no environment; known are team environments, PettingZoo parallel "
        "environments, RLlib MultiAgentEnvs and Gymnasium environments"
    )
