"""Builds small SMARL networks, minibatches and collected steps by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from actors.smarl.chunk import Chunk, SequenceChunk
from learners.smarl.common_action import CommonSpace
from learners.smarl.ddpg import Networks, TransitionBatch

CONTINUOUS = CommonSpace(False, 2, (-1.0, 0.0), (1.0, 4.0))
DISCRETE = CommonSpace(True, 3)
SPACES = [CONTINUOUS, DISCRETE]
INDIVIDUAL = 3


def space_name(space: object) -> str:
    return "discrete" if isinstance(space, CommonSpace) and space.discrete else "continuous"


def networks(space: CommonSpace = CONTINUOUS, hidden: tuple[int, ...] = (5,)) -> Networks:
    return Networks.of(INDIVIDUAL, space, hidden)


def random_rows(shapes: Networks, agents: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Actors [K, Pa] and critics [K, Pc], float64."""
    rng = np.random.default_rng([seed, 1])
    return (
        0.7 * rng.standard_normal((agents, shapes.actor.num_parameters)),
        0.7 * rng.standard_normal((agents, shapes.critic.num_parameters)),
    )


def tensors(rows: tuple[np.ndarray, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(rows[0]), torch.from_numpy(rows[1])


def actions(space: CommonSpace, rng: np.random.Generator, *shape: int) -> np.ndarray:
    if space.discrete:
        return np.eye(space.size)[rng.integers(space.size, size=shape)]
    return rng.uniform(space.low, space.high, (*shape, space.size))


def minibatch(space: CommonSpace, agents: int, rng: np.random.Generator, size: int = 6) -> TransitionBatch:
    """A random minibatch of every agent, float64; a quarter of its transitions ended their episodes."""
    return TransitionBatch(
        torch.from_numpy(rng.standard_normal((agents, size, INDIVIDUAL))),
        torch.from_numpy(actions(space, rng, agents, size)),
        torch.from_numpy(rng.standard_normal((agents, size))),
        torch.from_numpy(rng.standard_normal((agents, size, INDIVIDUAL))),
        torch.from_numpy(rng.random((agents, size)) < 0.25),
    )


def gumbel(space: CommonSpace, agents: int, rng: np.random.Generator, size: int = 6) -> torch.Tensor | None:
    return torch.from_numpy(rng.gumbel(size=(agents, size, space.size))) if space.discrete else None


def of_agents(batch: TransitionBatch, agents: Any) -> TransitionBatch:
    """The part of some agents."""
    return TransitionBatch(
        batch.observations[agents],
        batch.actions[agents],
        batch.rewards[agents],
        batch.next_observations[agents],
        batch.terminated[agents],
    )


def chunk(space: CommonSpace, steps: int, agents: int, seed: int, copies: int = 2) -> Chunk:
    """Random steps; the last copy's episode ends two steps before the end of the chunk."""
    rng = np.random.default_rng([seed, 2])
    alive = np.ones((steps, copies), bool)
    terminated = np.zeros((steps, copies), bool)
    alive[max(1, steps - 2) :, -1] = False
    terminated[max(1, steps - 2) - 1 :, -1] = True
    return Chunk(
        rng.standard_normal((steps + 1, copies, agents, INDIVIDUAL)).astype(np.float32),
        actions(space, rng, steps, copies, agents).astype(np.float32),
        rng.standard_normal((steps, copies, agents)).astype(np.float32),
        terminated,
        alive,
    )


def sequences(rows: int, agents: int, size: int, seed: int, distinct: int = 4) -> SequenceChunk:
    """Random steps for the memory, with only `distinct` different observations."""
    rng = np.random.default_rng([seed, 3])
    observed = np.random.default_rng(4).standard_normal((distinct, agents, size)).astype(np.float32)
    others = np.array([[j for j in range(agents) if j != i] for i in range(agents)])
    return SequenceChunk(
        observed[rng.integers(distinct, size=rows)],
        np.take_along_axis(others[None], rng.integers(agents - 1, size=(rows, agents, 1)), -1)[..., 0],
        rng.standard_normal(rows).astype(np.float32),
        np.tile(~np.eye(agents, dtype=bool), (rows, 1, 1)),
    )


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name, strict=True)
