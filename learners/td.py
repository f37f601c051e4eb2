"""Temporal-difference arithmetic: targets, errors and advantages of one update.

This module owns the numbers an update holds fixed.  It must not know models, devices or how samples were
collected. Results are float32; sums and means are taken in float64 and rounded once, so that they do not
depend on the order of a reduction.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learners.samples import FloatArray, Sample

IndexArray = NDArray[np.int64]

STD_FLOOR = 1e-6
"""Least standard deviation advantages are divided by, so that a group of equal errors becomes zeros."""


def next_turn_index(samples: Sequence[Sample]) -> IndexArray:
    """For every sample, the index of the same agent's next turn in the same rollout; -1 for a final turn.

    A rollout is one generation of one item, so `(agent_idx, item_idx, generation_idx)` names it; the samples
    may be in any order and belong to one agent or to several.

    Raises ValueError when two samples claim the same turn of the same rollout, or when a turn that is not
    final has no successor: a target computed over such a hole would silently drop the bootstrap.
    """
    position: dict[tuple[int, int, int, int], int] = {}
    for index, sample in enumerate(samples):
        key = (sample.agent_idx, sample.item_idx, sample.generation_idx, sample.turn_idx)
        if key in position:
            raise ValueError(
                f"samples {position[key]} and {index} are both agent {key[0]}, item {key[1]}, "
                f"generation {key[2]}, turn {key[3]}: a rollout has every turn once"
            )
        position[key] = index
    following = np.full(len(samples), -1, dtype=np.int64)
    for index, sample in enumerate(samples):
        if sample.is_final_turn:
            continue
        key = (sample.agent_idx, sample.item_idx, sample.generation_idx, sample.turn_idx + 1)
        if key not in position:
            raise ValueError(
                f"agent {key[0]}, item {key[1]}, generation {key[2]}: turn {sample.turn_idx} is not "
                f"the final one, but turn {key[3]} is missing from the samples"
            )
        following[index] = position[key]
    return following


def td_targets(rewards: ArrayLike, values: ArrayLike, next_index: IndexArray, discount: float) -> FloatArray:
    """TD targets `y_t = r_t + discount * V_old(t+1)`, and `y_t = r_t` alone for the final collected turn.

    `rewards` are processed rewards less the reference penalty, `values` the critic's at collection (of the
    sampled action in mode q), both of shape [n]; `next_index` is `next_turn_index`'s.  Returns float32 [n].
    """
    reward = np.asarray(rewards, dtype=np.float64)
    value = np.asarray(values, dtype=np.float64)
    if not (reward.shape == value.shape == next_index.shape) or reward.ndim != 1:
        raise ValueError(
            f"rewards {reward.shape}, values {value.shape} and next_index {next_index.shape} "
            "must share one length"
        )
    bootstrap = np.zeros_like(value)
    continues = next_index >= 0
    bootstrap[continues] = value[next_index[continues]]
    return (reward + discount * bootstrap).astype(np.float32)


def td_errors(targets: ArrayLike, values: ArrayLike) -> FloatArray:
    """TD errors `delta_t = y_t - V_old(t)`, the actor's weights; float32 [n]."""
    error: FloatArray = np.asarray(targets, dtype=np.float32) - np.asarray(values, dtype=np.float32)
    return error


def normalise_advantages(errors: ArrayLike, groups: Sequence[Sequence[int]]) -> FloatArray:
    """TD errors standardised inside each group: `(x - mean) / max(std, 1e-6)`, population std.

    `errors` has shape [n]; `groups` holds the indices of each agent-and-turn group.  A group of one sample
    keeps its error, as its standardised value would always be zero.  Returns float32 [n].
    """
    advantage = np.array(errors, dtype=np.float32)
    for group in groups:
        if len(group) > 1:
            members = advantage[list(group)]
            mean, std = members.mean(dtype=np.float64), members.std(dtype=np.float64)
            advantage[list(group)] = (members - np.float32(mean)) / np.float32(max(std, STD_FLOOR))
    return advantage


def returns_to_go(rewards: ArrayLike, next_index: IndexArray) -> FloatArray:
    """Undiscounted sum of `rewards` from each turn to its rollout's last one, the `expected_return` of the metrics.

    Both have shape [n]; `next_index` is `next_turn_index`'s.  Returns float32 [n].
    """
    reward = np.asarray(rewards, dtype=np.float64)
    total, position = reward.copy(), next_index
    while (continues := position >= 0).any():
        total[continues] += reward[position[continues]]
        position = np.where(continues, next_index[position], -1)
    return total.astype(np.float32)
