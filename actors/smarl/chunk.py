"""What an environment runner collects in a few steps: the part that workers learn from, and the coordinator's part.

Plain arrays; knows neither environments nor learners.  R^seq is made here, because both sides of it are at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.rewards import CallbackError
from learners.smarl.replay import Transitions

SequenceReward = Callable[[NDArray[np.float32]], NDArray[np.floating]]
"""R^seq [n] of the agents' rewards [n, N] at n steps."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """T steps of E environment copies with N agents each; what the action networks learn from."""

    observations: NDArray[np.float32]
    """Individual observations [T + 1, E, N, d]; step t goes from t to t + 1."""
    actions: NDArray[np.float32]
    """Common actions [T, E, N, size]."""
    rewards: NDArray[np.float32]
    """[T, E, N]"""
    terminated: NDArray[np.bool_]
    """[T, E]"""
    alive: NDArray[np.bool_]
    """[T, E]: False where the episode was over before the step, whose numbers then mean nothing."""

    def __len__(self) -> int:
        return len(self.rewards)

    def transitions(self, step: int) -> Transitions:
        """The joint transitions of step `step`, of the copies still alive."""
        alive = self.alive[step]
        return Transitions(
            self.observations[step, alive],
            self.actions[step, alive],
            self.rewards[step, alive],
            self.observations[step + 1, alive],
            self.terminated[step, alive],
        )


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The same steps as the target network's memory takes them: O^seq, A^seq and R^seq of n = (alive steps) rows."""

    observations: NDArray[np.float32]
    """Universal observations [n, N, s]."""
    targets: NDArray[np.int64]
    """[n, N]"""
    rewards: NDArray[np.float32]
    """R^seq [n]."""
    masks: NDArray[np.bool_]
    """[n, N, N]: which targets each agent could choose."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a runner's episodes stand."""

    steps: int
    """Steps in the chunk that this came with."""
    alive: int
    """Steps in it of copies whose episode was not over yet: environment steps."""
    returns: NDArray[np.float64]
    """Undiscounted sum of rewards so far [E, N]."""
    lengths: NDArray[np.int64]
    """Steps so far [E]."""
    over: NDArray[np.bool_]
    """[E]"""


def mean_reward(rewards: NDArray[np.float32]) -> NDArray[np.floating]:
    """R^seq as the mean of the agents' rewards, the default."""
    mean: NDArray[np.floating] = rewards.mean(1)
    return mean


def sequence_rewards(make: SequenceReward, rewards: NDArray[np.float32]) -> NDArray[np.float32]:
    """R^seq [n] of rewards [n, N].

    Raises:
        CallbackError: `make` raised, or did not return one finite number for each step.
    """
    name = getattr(make, "__qualname__", repr(make))
    try:
        made = np.asarray(make(rewards), np.float32)
    except Exception as error:
        raise CallbackError(
            f"sequence_reward {name} raised {type(error).__name__} for rewards of shape {rewards.shape}: {error}"
        ) from error
    if made.shape != rewards.shape[:1] or not np.isfinite(made).all():
        raise CallbackError(
            f"sequence_reward {name} must return {len(rewards)} finite numbers, one for each step; it returned "
            f"{_shown(made)}"
        )
    return made


def _shown(array: NDArray[np.float32]) -> str:
    if array.ndim == 1 and not np.isfinite(array).all():
        return f"{array[~np.isfinite(array)][0]} at step {int((~np.isfinite(array)).argmax())}"
    return f"an array of shape {array.shape}"
