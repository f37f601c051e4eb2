"""The target network's memory M_Seq: which targets were chosen for which observations, and what they earned.

Owns the rows, the choice of the best one for equal observations and the bound.  Knows no networks and no episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_COLUMNS = ("observations", "targets", "masks", "rewards")


@dataclass(frozen=True, slots=True)
class MemorySet:
    """Rows of one number of agents N."""

    observations: NDArray[np.float32]
    """O^seq [T, N, universal_size]"""
    targets: NDArray[np.int64]
    """A^seq [T, N]"""
    masks: NDArray[np.bool_]
    """[T, N, N], True where agent n might choose position j."""
    rewards: NDArray[np.float64]
    """R^seq [T]"""

    def __len__(self) -> int:
        return len(self.rewards)

    def rows(self, which: slice | NDArray[np.int64]) -> MemorySet:
        """Some of the rows: views for a slice, copies for indices."""
        return MemorySet(*(getattr(self, column)[which] for column in _COLUMNS))


class SequenceMemory:
    """M_Seq, kept for each N by itself.

    At most `capacity` rows per N outlive a compaction, which keeps the best row of equal observations and then drops
    the oldest of what is still too much.  One runs in every `select`, and whenever a quarter more rows than
    `capacity` has come together: a full memory would otherwise be sorted anew at each `add`.
    """

    def __init__(self, capacity: int, resolution: float | None = None) -> None:
        """`resolution` is the grid to which observations are rounded before they are compared; None compares exactly.

        Raises:
            ValueError: a capacity below 1 or a resolution that is not positive.
        """
        if capacity < 1:
            raise ValueError(f"memory_capacity {capacity} must be at least 1")
        if resolution is not None and not (resolution > 0 and np.isfinite(resolution)):
            raise ValueError(f"memory_resolution {resolution} must be positive and finite, or null for exact")
        self._capacity, self._resolution = capacity, resolution
        self._room = capacity + capacity // 4
        self._buffers: dict[int, MemorySet] = {}
        self._sizes: dict[int, int] = {}
        self._dropped = 0

    def add(self, observations: ArrayLike, targets: ArrayLike, rewards: ArrayLike, mask: ArrayLike) -> None:
        """Remembers T steps of N agents, oldest first.

        Args:
            observations: O^seq [T, N, universal_size].
            targets: A^seq [T, N], positions that `mask` allows.
            rewards: R^seq [T], one number per step.
            mask: [T, N, N] bool.

        Raises:
            ValueError: shapes that do not fit together or the rows held, a number that is not finite or a target that
                was not allowed (both named by step and agent); nothing is remembered then.
        """
        new = MemorySet(
            np.asarray(observations, np.float32),
            np.asarray(targets, np.int64),
            np.asarray(mask, np.bool_),
            np.asarray(rewards, np.float64),
        )
        _check(new)
        if not len(new):
            return
        agents = new.targets.shape[1]
        for held_agents, buffer in self._buffers.items():
            if buffer.observations.shape[2] != new.observations.shape[2]:
                raise ValueError(
                    f"observations of {agents} agents have {new.observations.shape[2]} numbers each, those held for "
                    f"{held_agents} agents have {buffer.observations.shape[2]}: universal_size is one for all"
                )
        if agents not in self._buffers:
            self._buffers[agents] = _buffer(self._room, agents, new.observations.shape[2])
            self._sizes[agents] = 0
        size = self._sizes[agents]
        if size + len(new) > self._room:
            held = self._held(agents)
            new = MemorySet(*(np.concatenate([getattr(held, c), getattr(new, c)]) for c in _COLUMNS))
            new, size = self._compacted(new), 0
        self._write(agents, size, new)

    def select(self) -> dict[int, MemorySet]:
        """M: by N, for equal O^seq the row with the largest R^seq, the earliest of equals, oldest first.

        Seed, algorithm SMARL: "Select by same O^Seq and max R^Seq".  Just these rows stay in the memory.
        """
        best = {agents: self._compacted(self._held(agents)) for agents in sorted(self._buffers)}
        for agents, rows in best.items():
            self._write(agents, 0, rows)
        return best

    def stats(self) -> dict[str, int]:
        """`memory_size` rows held, `memory_distinct` observations among them, `memory_dropped` rows lost to the bound.

        Dropped rows were the best ones of their observations; a row that a better one replaces does not count.
        """
        return {
            "memory_size": sum(self._sizes.values()),
            "memory_distinct": sum(len(self._best(self._held(agents))) for agents in self._buffers),
            "memory_dropped": self._dropped,
        }

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Everything held, for a checkpoint: `<N>.<column>` and `dropped`."""
        state: dict[str, NDArray[np.generic]] = {"dropped": np.array(self._dropped, np.int64)}
        for agents in sorted(self._buffers):
            held = self._held(agents)
            state |= {f"{agents}.{column}": getattr(held, column).copy() for column in _COLUMNS}
        return state

    def load_state(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        """Replaces everything held with a saved state.

        Raises:
            ValueError: more rows than fit.
        """
        saved = {
            int(name.partition(".")[0]): len(rows)
            for name, rows in state.items()
            if name.endswith(".rewards")
        }
        for agents, count in saved.items():
            if count > self._room:
                raise ValueError(
                    f"{count} saved sequences of {agents} agents do not fit a memory_capacity of {self._capacity}"
                )
        self._buffers, self._sizes = {}, {}
        for agents in sorted(saved):
            rows = MemorySet(*(state[f"{agents}.{column}"] for column in _COLUMNS))  # type: ignore[arg-type]
            self._buffers[agents] = _buffer(self._room, agents, rows.observations.shape[2])
            self._write(agents, 0, rows)
        self._dropped = int(state["dropped"])

    def _held(self, agents: int) -> MemorySet:
        return self._buffers[agents].rows(slice(self._sizes[agents]))

    def _write(self, agents: int, start: int, rows: MemorySet) -> None:
        end = start + len(rows)
        for column in _COLUMNS:
            getattr(self._buffers[agents], column)[start:end] = getattr(rows, column)
        self._sizes[agents] = end

    def _compacted(self, rows: MemorySet) -> MemorySet:
        """The best rows, the newest `capacity` of them; counts the others as dropped."""
        best = self._best(rows)
        self._dropped += max(0, len(best) - self._capacity)
        return rows.rows(best[-self._capacity :])

    def _best(self, rows: MemorySet) -> NDArray[np.int64]:
        """Indices, in order of age, of the best row of each observation."""
        if not len(rows):
            return np.zeros(0, np.int64)
        if self._resolution is None:
            # -0.0 becomes 0.0: what is equal must have the same bytes.
            compared: NDArray[np.floating] = rows.observations + np.float32(0)
        else:
            compared = np.rint(rows.observations.astype(np.float64) / self._resolution) + 0.0
        flat = np.ascontiguousarray(compared.reshape(len(rows), -1))
        keys = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).ravel()
        _, group = np.unique(keys, return_inverse=True)
        order = np.lexsort((-rows.rewards, group))  # stable, so that the earliest of equals comes first
        grouped = group[order]
        first = np.concatenate([[True], grouped[1:] != grouped[:-1]])
        best: NDArray[np.int64] = np.sort(order[first])
        return best


def _buffer(rows: int, agents: int, universal_size: int) -> MemorySet:
    return MemorySet(
        np.empty((rows, agents, universal_size), np.float32),
        np.empty((rows, agents), np.int64),
        np.empty((rows, agents, agents), np.bool_),
        np.empty(rows, np.float64),
    )


def _check(new: MemorySet) -> None:
    observations, targets, masks, rewards = (getattr(new, column) for column in _COLUMNS)
    shape = observations.shape
    if (
        observations.ndim != 3
        or 0 in shape[1:]
        or targets.shape != shape[:2]
        or masks.shape != (*shape[:2], shape[1])
        or rewards.shape != shape[:1]
    ):
        raise ValueError(
            f"observations {shape}, targets {targets.shape}, rewards {rewards.shape} and mask {masks.shape} must be "
            "[T, N, s], [T, N], [T] and [T, N, N]"
        )
    if (odd := np.argwhere(~np.isfinite(rewards))).size:
        step = int(odd[0, 0])
        raise ValueError(f"step {step}, all agents: the reward R^seq is {rewards[step]}; it must be finite")
    if (odd := np.argwhere(~np.isfinite(observations).all(-1))).size:
        step, agent = odd[0].tolist()
        raise ValueError(
            f"step {step}, agent {agent}: the universal observation {observations[step, agent].tolist()} must be finite"
        )
    inside = (targets >= 0) & (targets < shape[1])
    allowed = np.take_along_axis(masks, np.where(inside, targets, 0)[..., None], -1)[..., 0] & inside
    if (odd := np.argwhere(~allowed)).size:
        step, agent = odd[0].tolist()
        raise ValueError(
            f"step {step}, agent {agent}: target {targets[step, agent]} is not one that the mask allows"
        )
