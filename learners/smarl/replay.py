"""Replay of individual transitions in flat, preallocated tensors: M_DDPG as one process of agents holds it.

Owns storage and sampling.  Knows no networks.  Which rows a minibatch takes follows from the random streams that the
caller gives, so that a sample depends on the agent and the step alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learners.smarl.ddpg import TransitionBatch

_FIELDS = ("observations", "actions", "rewards", "next_observations", "terminated")


@dataclass(frozen=True, slots=True)
class Transitions:
    """Consecutive joint transitions of N agents; arrays [rows, N, ...], `terminated` [rows]."""

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    next_observations: np.ndarray
    terminated: np.ndarray


class Replay:
    """Ring buffers: one for each agent, or a single one that all agents sample from.

    Args:
        num_agents: agents that sample.
        shared: all agents' transitions in one buffer.  They are exchangeable in coordinates of the agent's own.
        capacity: rows of each buffer; the oldest are overwritten.
    """

    def __init__(
        self,
        num_agents: int,
        observation: int,
        action: int,
        *,
        capacity: int,
        shared: bool,
        dtype: torch.dtype,
    ) -> None:
        self.shared, self.capacity = shared, capacity
        self._dtype = dtype
        self._sizes = (observation, action)
        self._buffers = [self._empty() for _ in range(1 if shared else num_agents)]

    def _empty(self) -> _Ring:
        return _Ring(self.capacity, *self._sizes, self._dtype)

    def add(self, joint: Transitions, agents: Sequence[int]) -> None:
        """Store `joint`: of per-agent buffers, buffer k takes the part of agent `agents[k]`; a shared one takes all."""
        if not self.shared:
            for ring, agent in zip(self._buffers, agents, strict=True):
                ring.add(*_part(joint, agent))
            return
        for agent in range(joint.rewards.shape[1]):
            self._buffers[0].add(*_part(joint, agent))

    def sizes(self, num_agents: int) -> list[int]:
        """Rows that each of `num_agents` agents can sample from."""
        return [ring.size for ring in self._buffers] * (num_agents if self.shared else 1)

    def sample(
        self, batch_size: int, agents: Sequence[int], rngs: Sequence[np.random.Generator]
    ) -> TransitionBatch:
        """A minibatch for each of `agents`, uniform with replacement, by each one's own stream."""
        drawn = []
        for agent, rng in zip(agents, rngs, strict=True):
            ring = self._buffers[0 if self.shared else agent]
            indices = torch.from_numpy(rng.integers(ring.size, size=batch_size))
            drawn.append([getattr(ring, name)[indices] for name in _FIELDS])
        return TransitionBatch(*(torch.stack(parts) for parts in zip(*drawn, strict=True)))

    def keep(self, indices: Sequence[int]) -> None:
        """Agents other than `indices` have left; a shared buffer keeps what they saw."""
        if not self.shared:
            self._buffers = [self._buffers[i] for i in indices]

    def join(self, count: int) -> None:
        """`count` agents with empty memories join at the end."""
        if not self.shared:
            self._buffers += [self._empty() for _ in range(count)]

    def state(self, index: int) -> dict[str, np.ndarray]:
        """The rows of agent `index` (of the shared buffer), oldest first."""
        return self._buffers[0 if self.shared else index].state()

    def load_state(self, index: int, state: dict[str, np.ndarray]) -> None:
        """Continue agent `index` (the shared buffer) from what `state` returned."""
        ring = self._empty()
        ring.load_state(state)
        self._buffers[0 if self.shared else index] = ring


class _Ring:
    """One ring buffer."""

    def __init__(self, capacity: int, observation: int, action: int, dtype: torch.dtype) -> None:
        self.capacity, self.size, self._next = capacity, 0, 0
        self.observations = torch.zeros(capacity, observation, dtype=dtype)
        self.actions = torch.zeros(capacity, action, dtype=dtype)
        self.rewards = torch.zeros(capacity, dtype=dtype)
        self.next_observations = torch.zeros(capacity, observation, dtype=dtype)
        self.terminated = torch.zeros(capacity, dtype=torch.bool)

    def add(self, *columns: np.ndarray) -> None:
        columns = tuple(column[-self.capacity :] for column in columns)
        count = len(columns[0])
        where = (self._next + torch.arange(count)) % self.capacity
        for name, column in zip(_FIELDS, columns, strict=True):
            storage: Tensor = getattr(self, name)
            storage[where] = torch.from_numpy(np.ascontiguousarray(column)).to(storage.dtype)
        self._next = (self._next + count) % self.capacity
        self.size = min(self.size + count, self.capacity)

    def state(self) -> dict[str, np.ndarray]:
        order = (self._next - self.size + torch.arange(self.size)) % self.capacity
        rows = {name: getattr(self, name)[order].numpy() for name in _FIELDS}
        return {**rows, "next": np.array(self._next)}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        count = len(state["rewards"])
        if count > self.capacity:
            raise ValueError(f"{count} saved transitions do not fit a replay_capacity of {self.capacity}")
        # Rows go back to where they lay: which rows an index finds is part of the random stream.
        self._next = (int(state["next"]) - count) % self.capacity
        self.add(*(state[name] for name in _FIELDS))


def _part(joint: Transitions, agent: int) -> tuple[np.ndarray, ...]:
    return (
        joint.observations[:, agent],
        joint.actions[:, agent],
        joint.rewards[:, agent],
        joint.next_observations[:, agent],
        joint.terminated,
    )
