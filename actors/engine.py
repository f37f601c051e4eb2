"""What a generation engine is: the interface that vLLM and transformers both stand behind.

An engine turns token ids into token ids.  It must not know of text, agents, rewards or updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from learners.samples import FloatArray, IntArray
from learners.snapshot import WeightSnapshot


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. `temperature` 0 is greedy decoding; `top_k` None keeps every token."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None

    def greedy(self) -> Sampling:
        """The same length limit, the most likely token every time."""
        return Sampling(self.max_new_tokens, temperature=0.0)


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """Tokens of one completion up to and including the stop token, with their untempered log-probabilities."""

    token_ids: IntArray
    logprobs: FloatArray
    finish_reason: Literal["stop", "length"]


class Engine(Protocol):
    """A language model that samples and whose weights can be replaced while it lives."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together."""
        ...

    def generate(
        self, prompts: Sequence[IntArray], sampling: Sampling, seeds: Sequence[int], stop_ids: Sequence[int]
    ) -> list[EngineOutput]:
        """One completion per prompt; the i-th depends on the i-th prompt and seed alone, whatever its company."""
        ...

    def prompt_logprobs(self, token_ids: IntArray) -> FloatArray:
        """Log-probabilities of `token_ids[1:]`, each given the tokens before it; shape `[len(token_ids) - 1]`."""
        ...

    def load(self, snapshot: WeightSnapshot) -> None:
        """Replace the weights and forget every cached state computed with the old ones."""
        ...

    def transfer(self, step: str, arguments: Sequence[Any]) -> None:
        """A step of vLLM's weight transfer, in which new weights come straight from a learner."""
        ...

    def shutdown(self) -> None:
        """Release the engine's memory and processes."""
        ...
