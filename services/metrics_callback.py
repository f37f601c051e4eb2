"""Shows rollout samples to the user's `metrics_callback`, in the form that such callbacks expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.rewards import CallbackError
from learners.samples import Sample


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One sample as a metrics callback sees it."""

    agent_idx: int
    prompt: str
    completion: str
    reward: float
    returns: float
    advantage: float
    """0 during evaluation, where none is computed."""
    prompt_len: int
    response_len: int
    metadata: dict[str, Any]


def call_metrics_callback(
    callback: Callable[..., Any], samples: Sequence[Sample], advantages: Sequence[float] | None = None
) -> dict[str, float]:
    """The callback's numbers; values that are no finite numbers are left out.

    Raises:
        CallbackError: it raised, or did not return a dictionary.
    """
    name = getattr(callback, "__qualname__", repr(callback))
    shown = [
        RolloutSample(
            agent_idx=sample.agent_idx,
            prompt=sample.prompt,
            completion=sample.completion.text,
            reward=sample.reward,
            returns=sample.expected_return,
            advantage=0.0 if advantages is None else float(advantages[index]),
            prompt_len=len(sample.completion.prompt_ids),
            response_len=len(sample.completion.token_ids),
            metadata=sample.metadata,
        )
        for index, sample in enumerate(samples)
    ]
    try:
        values = callback(shown)
    except Exception as error:
        raise CallbackError(f"metrics_callback {name} raised {type(error).__name__}: {error}") from error
    if not isinstance(values, dict):
        raise CallbackError(
            f"metrics_callback {name} returned {values!r}; it must return a dictionary of numbers"
        )
    numbers = {str(key): _number(value) for key, value in values.items()}
    return {key: value for key, value in numbers.items() if value is not None}


def _number(value: Any) -> float | None:
    if hasattr(value, "item"):  # one-element tensors and numpy scalars
        try:
            value = value.item()
        except (RuntimeError, ValueError):
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
