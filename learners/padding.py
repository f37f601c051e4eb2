"""From ragged token ids to rectangular tensors, and how many rows a rectangle may have.

This module owns padding and the token budget.  It must not know models or losses.  Padding is token 0
everywhere: it is masked, so that any id of the vocabulary serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learners.samples import IntArray

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """`n` prompts padded on the left to `P` columns and their completions padded on the right to `C >= 1`.

    The completions of all rows begin in the same column, so that one index tensor names the positions whose
    logits are needed.
    """

    input_ids: Tensor
    """int64 [n, P + C]."""
    attention_mask: Tensor
    """int64 [n, P + C], 1 on real tokens."""
    position_ids: Tensor
    """int64 [n, P + C], counted from a row's first real token."""
    completion_ids: Tensor
    """int64 [n, C]."""
    completion_mask: Tensor
    """bool [n, C], true on completion tokens."""

    @property
    def prompt_width(self) -> int:
        """P, the column in which every completion begins."""
        return self.input_ids.shape[1] - self.completion_ids.shape[1]

    def logit_columns(self) -> Tensor:
        """int64 [C]: the positions that predict the completion tokens, each one before its token."""
        start = self.prompt_width - 1
        return torch.arange(start, start + self.completion_ids.shape[1], device=self.input_ids.device)

    def value_columns(self, mode: Literal["v", "q"]) -> Tensor:
        """int64 [n]: the position a value head reads: the last prompt token (v), the last completion token
        (q)."""
        last_prompt = self.prompt_width - 1
        if mode == "v":
            return torch.full_like(self.completion_ids[:, 0], last_prompt)
        return last_prompt + self.completion_mask.sum(dim=1)

    def to(self, device: torch.device) -> Self:
        """The same inputs on `device`."""
        return type(self)(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class TextInputs:
    """`n` whole texts padded on the right to `W` columns, for a critic."""

    input_ids: Tensor
    """int64 [n, W]."""
    attention_mask: Tensor
    """int64 [n, W], 1 on real tokens."""
    position_ids: Tensor
    """int64 [n, W]."""
    last_column: Tensor
    """int64 [n]: the position of each text's last token."""

    def to(self, device: torch.device) -> Self:
        """The same inputs on `device`."""
        return type(self)(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))


def lengths_of(sequences: Sequence[IntArray]) -> Rows:
    """int64 [n]: the lengths of `n` sequences."""
    return np.fromiter((len(s) for s in sequences), dtype=np.int64, count=len(sequences))


def pad(
    sequences: Sequence[IntArray], *, side: Literal["left", "right"], least_width: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Token ids int64 [n, W] and the mask of real tokens, W being the longest length (at least
    `least_width`)."""
    lengths = lengths_of(sequences)
    width = max(int(lengths.max(initial=0)), least_width)
    columns = np.arange(width)
    mask = columns < lengths[:, None] if side == "right" else columns >= width - lengths[:, None]
    ids = np.zeros(mask.shape, dtype=np.int64)
    # A boolean mask is filled row by row, which is the order of the concatenated sequences.
    ids[mask] = np.concatenate([np.empty(0, np.int64), *sequences])
    return ids, mask


def pad_policy(prompts: Sequence[IntArray], completions: Sequence[IntArray]) -> PolicyInputs:
    """Inputs of a policy for prompts (none empty) and their completions (some or all of which may be
    empty)."""
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt has no token: nothing predicts the first token of its completion")
    prompt_ids, prompt_mask = pad(prompts, side="left")
    completion_ids, completion_mask = pad(completions, side="right")
    mask = np.concatenate([prompt_mask, completion_mask], axis=1).astype(np.int64)
    return PolicyInputs(
        input_ids=torch.from_numpy(np.concatenate([prompt_ids, completion_ids], axis=1)),
        attention_mask=torch.from_numpy(mask),
        position_ids=torch.from_numpy((mask.cumsum(axis=1) - 1).clip(min=0)),
        completion_ids=torch.from_numpy(completion_ids),
        completion_mask=torch.from_numpy(completion_mask),
    )


def pad_texts(texts: Sequence[IntArray]) -> TextInputs:
    """Inputs of a critic for whole texts, none of which may be empty."""
    if any(len(text) == 0 for text in texts):
        raise ValueError("a critic's text has no token: there is no last hidden state to read a value from")
    ids, mask = pad(texts, side="right")
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()
    return TextInputs(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        position_ids=torch.from_numpy(positions),
        last_column=torch.from_numpy(lengths_of(texts) - 1),
    )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass."""

    rows: Rows
    counts: bool = True
    """False for a pass that a rank makes only because others still make one; its rows are another pass's."""


def deal_micro_batches(
    lengths: NDArray[np.int64], token_budget: int, rank: int, size: int
) -> list[MicroBatch]:
    """The micro-batches of one of `size` ranks, as many as every other rank has.

    Each row counts on exactly one rank.  Rows are dealt in the order of their lengths, so that ranks have alike work.
    """
    order = np.argsort(-lengths.sum(axis=1), kind="stable")
    hands = [order[start::size] for start in range(size)]
    plans = [[hand[part] for part in plan_micro_batches(lengths[hand], token_budget)] for hand in hands]
    mine = [MicroBatch(rows) for rows in plans[rank]]
    spare = MicroBatch(order[-1:], counts=False)
    return mine + [spare] * (max(map(len, plans)) - len(mine))


def plan_micro_batches(lengths: NDArray[np.int64], token_budget: int) -> list[Rows]:
    """Rows split into micro-batches whose padded size stays within `token_budget` tokens.

    `lengths` [n, parts] holds the lengths of each row's separately padded parts (prompt and completion; or
    one text), so that `m` rows occupy `m * sum(max of each part)`.  Rows of similar length go together.  A
    row that exceeds the budget by itself still gets a micro-batch of its own: it may not fit, but leaving it
    out would change the update.
    """
    if token_budget < 1:
        raise ValueError(f"the token budget must be at least 1, got {token_budget}")
    order = np.argsort(-lengths.sum(axis=1), kind="stable")
    plan: list[Rows] = []
    start = 0
    while start < len(order):
        widths = np.maximum.accumulate(lengths[order[start:]], axis=0).sum(axis=1)
        # The size grows with every row, so that the rows within the budget are a prefix.
        sizes = np.arange(1, len(widths) + 1) * widths
        taken = max(1, int(np.searchsorted(sizes, token_budget, side="right")))
        plan.append(order[start : start + taken])
        start += taken
    return plan
