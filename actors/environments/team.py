"""What a team environment is: E copies side by side, N agents in each, and what is checked at its border.

Owns the types between environments and whoever runs them.  It must not know any environment, nor who chooses actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from learners.smarl.common_action import CommonSpace

__all__ = [
    "BoolArray",
    "CommonSpace",
    "FloatArray",
    "IntArray",
    "TeamEnvironment",
    "TeamEnvironmentError",
    "TeamObservation",
    "TeamSpace",
    "TeamStep",
    "check_actions",
    "check_observation",
    "check_shapes",
    "check_step",
    "others_mask",
]

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

BOUNDS_SLACK = 1e-5
"""How far a continuous action may be outside its range, in ranges: what float32 loses when tanh is scaled to it."""


class TeamEnvironmentError(RuntimeError):
    """An environment, or an action given to it, breaks the contract; the message says which copy, agent and step."""


@dataclass(frozen=True, slots=True)
class TeamSpace:
    """Sizes of observations and actions; none of them depends on the number of agents."""

    individual_size: int
    universal_size: int
    common: CommonSpace
    targets_are_agents: bool = True
    """Target j is agent j, which j itself may not choose; False where it is something else, say a landmark."""
    has_targets: bool = True
    """False where the environment ignores the individual action."""


@dataclass(frozen=True, slots=True)
class TeamObservation:
    """What all agents of all copies see at one moment."""

    individual: FloatArray
    """[E, N, individual_size]: o^d, every agent's own view."""
    universal: FloatArray
    """[E, N, universal_size]: the sequence o^s in agent order, one element for each agent."""
    target_mask: BoolArray
    """[E, N, N]: True where agent i may choose target j; no row is empty."""


@dataclass(frozen=True, slots=True)
class TeamStep:
    """What one step of all copies led to."""

    observation: TeamObservation
    """After the step, also where it ended the episode: environments never reset themselves."""
    rewards: FloatArray
    """[E, N]"""
    terminated: BoolArray
    """[E]: the episode came to its end, after which there is nothing to gain."""
    truncated: BoolArray
    """[E]: the episode was cut short, say by a time limit; what would have followed still counts."""


class TeamEnvironment(Protocol):
    """E copies of an environment, stepped side by side.

    A copy whose episode has ended must tolerate further steps with any action, and what it then returns is ignored,
    until the next `reset`.  What happens in a copy depends on its seed and its actions alone, not on other copies.
    """

    space: TeamSpace
    num_envs: int
    num_agents: int

    def reset(self, seeds: Sequence[int]) -> TeamObservation:
        """Start a new episode in every copy, each from its own seed (0 or more, below 2**63)."""
        ...

    def step(self, common: FloatArray, targets: IntArray) -> TeamStep:
        """Act: `common` [E, N, size] within bounds, or one-hot rows; `targets` [E, N] allowed by the last mask."""
        ...

    def close(self) -> None:
        """Release what the copies hold."""
        ...


def others_mask(num_envs: int, num_agents: int) -> BoolArray:
    """The mask [E, N, N] under which every agent may choose every other one; an only agent has but itself."""
    alone = num_agents == 1
    mask = np.ones((num_agents, num_agents), bool) if alone else ~np.eye(num_agents, dtype=bool)
    return np.tile(mask, (num_envs, 1, 1))


def check_actions(
    space: TeamSpace,
    observation: TeamObservation,
    common: FloatArray,
    targets: IntArray,
    *,
    step: int,
    running: BoolArray,
) -> None:
    """Check the actions of running copies against `space` and the mask of the `observation` they answer.

    `step` is the number of the step to be taken; `running` [E] is False where an episode has ended: any action will do
    there.

    Raises:
        TeamEnvironmentError: wrong shape; an action out of bounds, not one-hot, or aimed at what the mask forbids.
    """
    mask, kind = observation.target_mask, space.common
    _expect("common actions", common, (*mask.shape[:2], kind.size))
    _expect("targets", targets, mask.shape[:2])
    if kind.discrete:
        one_hot: BoolArray = ((common == 0) | (common == 1)).all(-1) & (common.sum(-1) == 1)
        for copy, agent in _first(~one_hot, running):
            raise TeamEnvironmentError(
                f"{_where(copy, agent, step)}: the common action {common[copy, agent].tolist()} is not one of "
                f"{kind.size} choices; write a one-hot row"
            )
    else:
        low, high = np.array(kind.low), np.array(kind.high)
        slack = BOUNDS_SLACK * (high - low)
        inside: BoolArray = (common >= low - slack) & (common <= high + slack)  # False for NaN too
        for copy, agent, place in _first(~inside, running):
            raise TeamEnvironmentError(
                f"{_where(copy, agent, step)}: common action {common[copy, agent, place]} in dimension {place} "
                f"is outside its bounds [{kind.low[place]}, {kind.high[place]}]; clip it"
            )
    if not space.has_targets:
        return
    choices = mask.shape[2]
    known = (targets >= 0) & (targets < choices)
    allowed: BoolArray = (
        known & np.take_along_axis(mask, np.where(known, targets, 0)[..., None], axis=2)[..., 0]
    )
    for copy, agent in _first(~allowed, running):
        raise TeamEnvironmentError(
            f"{_where(copy, agent, step)}: the mask forbids target {targets[copy, agent]}; "
            f"allowed are {np.flatnonzero(mask[copy, agent]).tolist()}"
        )


def check_observation(observation: TeamObservation, step: int, *, running: BoolArray | None = None) -> None:
    """Check what agents see after step number `step`, 0 after a reset, in copies that are `running` [E], default all.

    Raises:
        TeamEnvironmentError: a number that is not finite, or an agent with no target to choose.
    """
    for kind, values in (("individual", observation.individual), ("universal", observation.universal)):
        for copy, agent, place in _first(~np.isfinite(values), running):
            raise TeamEnvironmentError(
                f"{_where(copy, agent, step)}: the {kind} observation is {values[copy, agent, place]} "
                f"at position {place}; every number must be finite"
            )
    empty: BoolArray = np.logical_not(observation.target_mask.any(-1))
    for copy, agent in _first(empty, running):
        raise TeamEnvironmentError(
            f"{_where(copy, agent, step)}: the mask leaves no target to choose; allow one, even if it has no effect"
        )


def check_step(outcome: TeamStep, step: int, *, running: BoolArray | None = None) -> None:
    """Check what step number `step` returned for copies that were `running` [E], default all.

    Raises:
        TeamEnvironmentError: as `check_observation`, or for a reward that is not finite.
    """
    for copy, agent in _first(~np.isfinite(outcome.rewards), running):
        raise TeamEnvironmentError(
            f"{_where(copy, agent, step)}: the reward is {outcome.rewards[copy, agent]}; it must be finite"
        )
    check_observation(outcome.observation, step, running=running)


def check_shapes(
    space: TeamSpace, num_envs: int, num_agents: int, observation: TeamObservation, outcome: TeamStep | None
) -> None:
    """Check every array's shape against `space`, and that flags are bool.

    `outcome` is the step that `observation` belongs to, None after a reset.

    Raises:
        TeamEnvironmentError: the array's name, what it is and what it should be.
    """
    team = (num_envs, num_agents)
    _expect("individual observations", observation.individual, (*team, space.individual_size))
    _expect("universal observations", observation.universal, (*team, space.universal_size))
    _expect("target masks", observation.target_mask, (*team, num_agents), np.bool_)
    if outcome is not None:
        _expect("rewards", outcome.rewards, team)
        _expect("terminated", outcome.terminated, (num_envs,), np.bool_)
        _expect("truncated", outcome.truncated, (num_envs,), np.bool_)


def _expect(name: str, values: NDArray[Any], shape: tuple[int, ...], kind: type | None = None) -> None:
    if values.shape != shape:
        raise TeamEnvironmentError(f"{name} have shape {values.shape} instead of {shape}")
    if kind is not None and values.dtype != kind:
        raise TeamEnvironmentError(f"{name} are {values.dtype} instead of {np.dtype(kind)}")


def _first(wrong: NDArray[np.bool_], running: BoolArray | None) -> list[list[int]]:
    """The index of the first True of `wrong` [E, ...] in a running copy, in a list; an empty list if there is none."""
    if running is not None and wrong.any():
        wrong = wrong & running.reshape(-1, *[1] * (wrong.ndim - 1))
    return np.argwhere(wrong)[:1].tolist() if wrong.any() else []


def _where(copy: int, agent: int, step: int) -> str:
    return f"copy {copy}, agent {agent}, step {step}"
