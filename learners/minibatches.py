"""How one agent's samples are grouped and cut into the mini-batches of an update.

This module owns the order in which samples are stepped.  It must not know models, rewards or where randomness
is seeded: the caller hands a generator in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learners.samples import MiniBatches


def group_by_turn(turns: Sequence[int]) -> list[list[int]]:
    """Indices of one agent's samples grouped by turn, earliest turn first, each group in the samples'
    order."""
    groups: dict[int, list[int]] = {}
    for index, turn in enumerate(turns):
        groups.setdefault(int(turn), []).append(index)
    return [groups[turn] for turn in sorted(groups)]


def plan_minibatches(
    turns: Sequence[int], train_batch_size: int, rng: np.random.Generator | None = None
) -> MiniBatches:
    """The mini-batches of one agent's update, in the order in which they are stepped.

    Groups by turn, shuffles each group with `rng` (None keeps the samples' order) and cuts it into
    mini-batches of `train_batch_size`.  A mini-batch never mixes turns; the last one of a group may be
    smaller and is used as it is.
    """
    if train_batch_size < 1:
        raise ValueError(f"train_batch_size must be at least 1, got {train_batch_size}")
    minibatches: MiniBatches = []
    for group in group_by_turn(turns):
        order = group if rng is None else [group[i] for i in rng.permutation(len(group))]
        minibatches += [
            order[start : start + train_batch_size] for start in range(0, len(order), train_batch_size)
        ]
    return minibatches
