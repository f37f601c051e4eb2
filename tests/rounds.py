"""Builds update rounds by hand, and reads the recorded ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from learners.samples import Completion, Sample
from services.learner_group import AgentRound

_COPY = Path(__file__).parent / "oracle"
_SHARED = Path(os.environ.get("GREENROOM_ORACLE", Path(__file__).parents[2] / "shared" / "oracle"))


def oracle_folder() -> Path:
    """The recorded runs: the shared ones where they exist, else the copy beside the tests."""
    return _SHARED if _SHARED.is_dir() else _COPY


def recorded(name: str) -> dict[str, Any]:
    return json.loads((oracle_folder() / f"{name}.json").read_text())


def sample(agent: int = 0, item: int = 0, turn: int = 0, **changes: Any) -> Sample:
    """A sample with plain defaults."""
    values: dict[str, Any] = {
        "generation_idx": 0,
        "prompt": f"prompt {item}",
        "completion": completion(),
        "reward": 0.5,
        "is_final_turn": True,
        "expected_return": 0.5,
        "metadata": {"turn_idx": turn, "generation_idx": 0, "batch_item": {"prompt": "p"}},
    }
    return Sample(agent_idx=agent, item_idx=item, turn_idx=turn, **{**values, **changes})


def completion(tokens: int = 3, **changes: Any) -> Completion:
    values: dict[str, Any] = {
        "prompt_ids": np.arange(4, dtype=np.int32),
        "token_ids": np.arange(tokens, dtype=np.int32),
        "logprobs": np.full(tokens, -0.5, np.float32),
        "text": "x" * tokens,
        "finish_reason": "stop",
        "weight_version": 0,
    }
    return Completion(**{**values, **changes})


def agent_round(samples: list[Sample], **changes: Any) -> AgentRound:
    n = len(samples)
    values: dict[str, Any] = {
        "values": np.zeros(n, np.float32),
        "td_targets": np.array([s.reward for s in samples], np.float32),
        "td_errors": np.array([s.reward for s in samples], np.float32),
        "advantages": np.zeros(n, np.float32),
        "reference_kl": None,
        "minibatches": [list(range(n))],
    }
    return AgentRound(samples=samples, **{**values, **changes})
