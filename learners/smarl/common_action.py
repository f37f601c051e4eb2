"""Common actions: what an actor network's outputs mean, to the critic, to the environment and while exploring.

Owns the two kinds, continuous within bounds and discrete as one-hot rows.  Knows no agents and no networks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CommonSpace:
    """The actions that every agent has.

    Raises:
        ValueError: a continuous space without one finite, non-empty range for each dimension.
    """

    discrete: bool
    size: int
    """Number of dimensions, or of choices."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Bounds of each dimension; empty where actions are discrete."""

    def __post_init__(self) -> None:
        if self.discrete:
            return
        if not len(self.low) == len(self.high) == self.size:
            raise ValueError(
                f"{self.size} action dimensions need as many bounds; low has {len(self.low)}, high {len(self.high)}"
            )
        for dimension, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if not (np.isfinite(low) and np.isfinite(high) and low < high):
                raise ValueError(
                    f"action dimension {dimension} ranges from {low} to {high}; DDPG needs finite bounds, low < high"
                )

    def action(self, outputs: Tensor) -> Tensor:
        """What the critic reads for actor outputs [..., size], without exploration.

        Continuous: tanh scaled to the bounds, differentiable.  Discrete: the one-hot row of the largest output.
        """
        if self.discrete:
            return torch.nn.functional.one_hot(outputs.argmax(-1), self.size).to(outputs.dtype)
        low, high = (outputs.new_tensor(bound) for bound in (self.low, self.high))
        return (high + low) / 2 + (high - low) / 2 * outputs.tanh()

    def relaxed(self, outputs: Tensor, gumbel: Tensor | None, temperature: float) -> Tensor:
        """The action through which the actor's gradient flows.

        Discrete: straight-through Gumbel-softmax, one-hot forward and softmax backward (Jang, Gu and Poole, 2017);
        `gumbel` is standard Gumbel noise in the shape of `outputs`.  Continuous: `action`.
        """
        if not self.discrete:
            return self.action(outputs)
        assert gumbel is not None
        soft = ((outputs + gumbel) / temperature).softmax(-1)
        hard = torch.nn.functional.one_hot(soft.argmax(-1), self.size).to(soft.dtype)
        return hard + soft - soft.detach()


@dataclass(frozen=True, slots=True)
class Exploration:
    """How far behaviour strays from the policy, at one moment of the run."""

    noise: float
    """Continuous: standard deviation of Gaussian noise, in halves of the range."""
    epsilon: float
    """Discrete: probability of a uniformly random choice."""
    temperature: float
    """Discrete: temperature of the softmax that is otherwise sampled."""


def explore(
    space: CommonSpace, outputs: NDArray[np.floating], how: Exploration, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Executed actions [..., size] for actor outputs of that shape: within bounds, or one-hot rows."""
    if not space.discrete:
        low, high = np.array(space.low), np.array(space.high)
        half = (high - low) / 2
        action = (high + low) / 2 + half * np.tanh(outputs)
        noisy = action + how.noise * half * rng.standard_normal(outputs.shape)
        clipped: NDArray[np.float32] = np.clip(noisy, low, high).astype(np.float32)
        return clipped
    scores = outputs / how.temperature + rng.gumbel(size=outputs.shape)
    random_scores = rng.random(outputs.shape)
    at_random = rng.random((*outputs.shape[:-1], 1)) < how.epsilon
    return one_hot(np.where(at_random, random_scores, scores).argmax(-1), space.size)


def exploit(space: CommonSpace, outputs: NDArray[np.floating]) -> NDArray[np.float32]:
    """Executed actions without exploration."""
    action: NDArray[np.float32] = space.action(torch.from_numpy(np.asarray(outputs, np.float32))).numpy()
    return action


def random_actions(
    space: CommonSpace, shape: tuple[int, ...], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Uniformly random actions [*shape, size], the policy that knows nothing."""
    if space.discrete:
        return one_hot(rng.integers(space.size, size=shape), space.size)
    uniform: NDArray[np.float32] = rng.uniform(space.low, space.high, size=(*shape, space.size)).astype(
        np.float32
    )
    return uniform


def one_hot(choices: NDArray[np.integer], size: int) -> NDArray[np.float32]:
    """Rows [..., size] with a one at each of `choices` [...]."""
    rows: NDArray[np.float32] = np.eye(size, dtype=np.float32)[choices]
    return rows
