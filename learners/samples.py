"""The seam between acting and learning: what a rollout hands to an update.

This module owns the batch types and must not know how completions are generated nor how they are learned from.
Everything is plain numpy, so that a batch travels between processes without copies of torch state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learners.ragged import Ragged

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of one agent, as its generation engine sampled it.

    `token_ids` holds every sampled token, a sampled end-of-sequence token included and padding never, so its length
    is the number of terms in the completion's log-probability.  `logprobs` are the engine's own, under the untempered
    policy, one per token.
    """

    prompt_ids: IntArray
    token_ids: IntArray
    logprobs: FloatArray
    text: str
    finish_reason: str
    """"stop" (end-of-sequence sampled) or "length" (`max_new_tokens` reached)."""
    weight_version: int
    prompt_truncated: bool = False


@dataclass(frozen=True, slots=True)
class CompletionBatch:
    """Completions of one weight version on their way between processes."""

    prompt_ids: Ragged
    token_ids: Ragged
    logprobs: Ragged
    texts: list[str]
    finish_reasons: list[str]
    prompts_truncated: list[bool]
    weight_version: int

    def unpack(self) -> list[Completion]:
        """Its completions, whose arrays are views of the batch's."""
        return [
            Completion(prompt, tokens, logprobs, text, reason, self.weight_version, cut)
            for prompt, tokens, logprobs, text, reason, cut in zip(
                self.prompt_ids,
                self.token_ids,
                self.logprobs,
                self.texts,
                self.finish_reasons,
                self.prompts_truncated,
                strict=True,
            )
        ]


@dataclass(slots=True)
class Sample:
    """One agent's part of one turn of one rollout: the unit that an update averages over."""

    agent_idx: int
    item_idx: int
    turn_idx: int
    generation_idx: int
    prompt: str
    completion: Completion
    reward: float
    """Processed reward r_t, before the reference penalty."""
    is_final_turn: bool
    """True for the last collected turn of the rollout: its TD target is the reward alone."""
    expected_return: float
    """Undiscounted sum of rewards from this turn on; an update with a reference penalty takes that off."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """`turn_idx`, `generation_idx`, `batch_item` and whatever else a metrics callback may read."""


@dataclass(slots=True)
class TokenBatch:
    """Prompt and completion token ids of `n` samples, unpadded; padding is the learner's business."""

    prompt_ids: Sequence[IntArray]
    completion_ids: Sequence[IntArray]
    sampled_logprobs: Sequence[FloatArray] | None = None
    """The engine's, one per token of a completion, where an update weighs tokens by them."""

    def __len__(self) -> int:
        return len(self.prompt_ids)

    @classmethod
    def of(cls, samples: Sequence[Sample], *, with_logprobs: bool = False) -> TokenBatch:
        """The token ids of `samples`, in their order."""
        return cls(
            Ragged.of([s.completion.prompt_ids for s in samples], np.int32),
            Ragged.of([s.completion.token_ids for s in samples], np.int32),
            Ragged.of([s.completion.logprobs for s in samples], np.float32) if with_logprobs else None,
        )


MiniBatches = list[list[int]]
"""Indices into an agent's samples: the mini-batches of one update, in the order in which they are stepped."""
