"""E copies of a foreign environment as a team environment: PettingZoo parallel, RLlib `MultiAgentEnv`, Gymnasium.

Owns the order of agents, the ends of episodes and what hooks may return.  It must not know what is played.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from actors.environments.adapters import Adapter, adapt
from actors.environments.hooks import Hooks, View
from actors.environments.spaces import common_actions, flat_size, flatten
from actors.environments.team import (
    BoolArray,
    FloatArray,
    IntArray,
    TeamEnvironmentError,
    TeamObservation,
    TeamSpace,
    TeamStep,
    others_mask,
)

ALL = "__all__"


class MultiAgentTeam:
    """Copies of one environment whose agents are alike, or are made so by hooks.

    An episode ends for all agents at once.  One that leaves before the others is an error: the numbers of agents, and
    with them the sequence of the target network, hold for an episode.  Where some agents terminate in the very step in
    which others are truncated, the episode counts as truncated.

    Args:
        environments: One for each copy, all made alike and not shared.
        num_agents: N; the number of agents that the environment must have.
        hooks: How its observations and actions are to be split.

    Raises:
        TeamEnvironmentError: another number of agents; agents with different spaces, or spaces of unknown kinds, where
            no hook stands in; a hook that returns something of the wrong shape.
    """

    def __init__(self, environments: Sequence[Any], *, num_agents: int, hooks: Hooks | None = None) -> None:
        self._hooks = hooks = hooks or Hooks()
        self._copies: list[Adapter] = [adapt(environment) for environment in environments]
        self.num_envs, self.num_agents = len(self._copies), num_agents
        for copy in self._copies:
            _expect_agents(copy.agents, num_agents)
        first = self._copies[0]
        self._compose = hooks.compose_action
        if hooks.common_space is None or self._compose is None:
            if hooks.common_space is not None:
                raise TeamEnvironmentError("the hook common_space needs the hook compose_action beside it")
            common, self._act = common_actions(_shared(first.agents, first.action_space, "action"))
        else:
            common = hooks.common_space
        self._flat_space: Any = None
        if hooks.individual_observation is None or hooks.universal_observation is None:
            self._flat_space = _shared(first.agents, first.observation_space, "observation")
        self._sizes = self._observation_sizes(first)
        self.space = TeamSpace(
            *self._sizes,
            common,
            targets_are_agents=hooks.targets_are_agents,
            has_targets=self._compose is not None,
        )
        mask_shape = (num_agents, num_agents)
        self._mask = others_mask(1, num_agents)[0] if hooks.targets_are_agents else np.ones(mask_shape, bool)
        self._raw: list[list[Any]] = [[] for _ in self._copies]
        self._ended: tuple[BoolArray, BoolArray] = _flags(self.num_envs)
        self._last: TeamObservation | None = None

    def reset(self, seeds: Sequence[int]) -> TeamObservation:
        """Start a new episode in every copy; of each seed the low 31 bits are handed on."""
        self._raw = [
            self._in_order(copy, adapter, adapter.reset(seed), "observation")
            for copy, (adapter, seed) in enumerate(zip(self._copies, seeds, strict=True))
        ]
        self._ended, self._last = _flags(self.num_envs), None
        self._last = self._observe(range(self.num_envs))
        return self._last

    def step(self, common: FloatArray, targets: IntArray) -> TeamStep:
        """Step the copies that still run; the others return their last observation and no reward."""
        terminated, truncated = (flags.copy() for flags in self._ended)
        rewards = np.zeros((self.num_envs, self.num_agents), np.float32)
        running = np.flatnonzero(~(terminated | truncated)).tolist()
        for copy in running:
            adapter, raw = self._copies[copy], self._raw[copy]
            if self._compose is None:
                actions = [self._act(action) for action in common[copy]]
            else:
                actions = [
                    self._compose(common[copy, agent], int(targets[copy, agent]), raw[agent], agent)
                    for agent in range(self.num_agents)
                ]
            result = adapter.step(dict(zip(adapter.agents, actions, strict=True)))
            terminated[copy], truncated[copy] = self._ends(copy, adapter, result.terminated, result.truncated)
            self._raw[copy] = self._in_order(copy, adapter, result.observations, "observation")
            rewards[copy] = self._in_order(copy, adapter, result.rewards, "reward")
        self._ended = terminated, truncated
        self._last = self._observe(running)
        return TeamStep(self._last, rewards, terminated.copy(), truncated.copy())

    def close(self) -> None:
        """Close every copy."""
        for copy in self._copies:
            copy.close()

    def _observe(self, copies: Sequence[int]) -> TeamObservation:
        """New arrays, with the rows of `copies` made from what they last returned and the others as they were."""
        shape = (self.num_envs, self.num_agents)
        last = self._last
        if last is None:
            individual, universal = (np.zeros((*shape, size), np.float32) for size in self._sizes)
            mask = np.tile(self._mask, (self.num_envs, 1, 1))
        else:
            individual, universal = last.individual.copy(), last.universal.copy()
            mask = last.target_mask.copy()
        for copy in copies:
            raw = self._raw[copy]
            individual[copy], universal[copy] = self._views(self._copies[copy].agents, raw)
            if self._hooks.target_mask is not None:
                mask[copy] = self._hook_mask(raw)
        return TeamObservation(individual, universal, mask)

    def _views(self, agents: Sequence[Any], raw: Sequence[Any]) -> tuple[list[FloatArray], list[FloatArray]]:
        hooks = self._hooks
        flat = [] if self._flat_space is None else [flatten(self._flat_space, one) for one in raw]
        own, all_ = hooks.individual_observation, hooks.universal_observation
        individual_size, universal_size = self._sizes
        return (
            flat if own is None else _ask("individual_observation", own, agents, raw, individual_size),
            flat if all_ is None else _ask("universal_observation", all_, agents, raw, universal_size),
        )

    def _observation_sizes(self, adapter: Adapter) -> tuple[int, int]:
        """Sizes of the individual and the universal observation; hooks are asked once, to see what they return."""
        sizes = []
        raw: list[Any] = []
        for name in ("individual_observation", "universal_observation"):
            view: View | None = getattr(self._hooks, name)
            if view is None:
                sizes.append(flat_size(self._flat_space))
            else:
                raw = raw or self._in_order(0, adapter, adapter.reset(0), "observation")
                sizes.append(_ask(name, view, adapter.agents, raw, None)[0].size)
        return sizes[0], sizes[1]

    def _hook_mask(self, raw: Sequence[Any]) -> BoolArray:
        assert self._hooks.target_mask is not None
        mask = np.asarray(self._hooks.target_mask(raw))
        expected = (self.num_agents, self.num_agents)
        if mask.shape != expected or mask.dtype != np.bool_:
            raise TeamEnvironmentError(
                f"hook target_mask returned {mask.dtype} of shape {mask.shape}; bool of shape {expected} is needed"
            )
        return mask

    def _in_order(self, copy: int, adapter: Adapter, values: dict[Any, Any], what: str) -> list[Any]:
        missing = [agent for agent in adapter.agents if agent not in values]
        if missing:
            raise TeamEnvironmentError(f"copy {copy}: agent {missing[0]!r} has no {what}; {_TOGETHER}")
        extra = [agent for agent in values if agent not in adapter.agents and agent != ALL]
        if extra:
            raise TeamEnvironmentError(
                f"copy {copy}: there is a {what} for {extra[0]!r}, which is none of the agents {adapter.agents}"
            )
        return [values[agent] for agent in adapter.agents]

    def _ends(
        self, copy: int, adapter: Adapter, terminated: dict[Any, Any], truncated: dict[Any, Any]
    ) -> tuple[bool, bool]:
        ends = [
            [bool(flags.get(ALL) or flags.get(agent)) for agent in adapter.agents]
            for flags in (terminated, truncated)
        ]
        gone = [one or other for one, other in zip(*ends, strict=True)]
        if any(gone) and not all(gone):
            raise TeamEnvironmentError(
                f"copy {copy}: agent {adapter.agents[gone.index(True)]!r} leaves the episode "
                f"but {adapter.agents[gone.index(False)]!r} does not; {_TOGETHER}"
            )
        all_terminated, all_truncated = (all(flags) for flags in ends)
        return all_terminated, all_truncated or (all(gone) and not all_terminated)


_TOGETHER = (
    "all agents must act and be rewarded in every step until the episode ends for all of them "
    "(a wrapper may keep the departed in with zeros, as SuperSuit's black_death does)"
)


def _flags(num_envs: int) -> tuple[BoolArray, BoolArray]:
    return np.zeros(num_envs, bool), np.zeros(num_envs, bool)


def _expect_agents(agents: Sequence[Any], num_agents: int) -> None:
    if len(agents) != num_agents:
        raise TeamEnvironmentError(
            f"the environment has {len(agents)} agents {list(agents)}, but {num_agents} are asked for; "
            "let it be made by a function that takes num_agents, or ask for as many"
        )


def _shared(agents: Sequence[Any], space_of: Callable[[Any], Any], what: str) -> Any:
    """The space that all agents have."""
    spaces = [space_of(agent) for agent in agents]
    for agent, space in zip(agents, spaces, strict=True):
        if space != spaces[0]:
            hooks = (
                "common_space and compose_action"
                if what == "action"
                else "individual_observation and universal_observation"
            )
            raise TeamEnvironmentError(
                f"agents {agents[0]!r} and {agent!r} have different {what} spaces, {spaces[0]} and {space}; "
                f"make them equal with the hooks {hooks}"
            )
    return spaces[0]


def _ask(
    name: str, view: View, agents: Sequence[Any], raw: Sequence[Any], size: int | None
) -> list[FloatArray]:
    """What the hook `name` returns for every agent, float32 [size]; without `size`, the first answer's."""
    answers: list[FloatArray] = []
    for number, agent in enumerate(agents):
        answer = np.asarray(view(raw[number], number, raw), np.float32)
        size = answer.size if size is None else size
        if answer.shape != (size,) or size == 0:
            raise TeamEnvironmentError(
                f"hook {name} returned shape {answer.shape} for agent {agent!r}; "
                f"a 1-D array is needed, of {size or 'one or more'} numbers for every agent"
            )
        answers.append(answer)
    return answers
