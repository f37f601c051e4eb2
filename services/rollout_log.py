"""Every sample of a run on disk, one parquet file per update round, readable as one data set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from services.learner_group import AgentRound
from services.metrics import MetricsError
from services.run_folder import RunFolder

SCHEMA = pa.schema(
    [
        ("round", pa.int64()),
        ("epoch", pa.int64()),
        ("item_idx", pa.int64()),
        ("turn_idx", pa.int32()),
        ("generation_idx", pa.int32()),
        ("agent_idx", pa.int32()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("finish_reason", pa.string()),
        ("reward", pa.float32()),
        ("reference_kl", pa.float32()),
        ("value", pa.float32()),
        ("td_target", pa.float32()),
        ("td_error", pa.float32()),
        ("advantage", pa.float32()),
        ("expected_return", pa.float32()),
        ("weight_version", pa.int64()),
        ("staleness", pa.int32()),
        ("engine_logprob", pa.float32()),
    ]
)


class RolloutLog:
    """The `rollouts/` folder.

    Args:
        resume_round: the round that a run continues from; later files are removed, because those rounds happen again.
    """

    def __init__(self, run: RunFolder, *, resume_round: int | None) -> None:
        self._folder = run.rollouts
        self._folder.mkdir(exist_ok=True)
        for path in self._folder.glob("round_*.parquet"):
            if resume_round is not None and int(path.stem.removeprefix("round_")) > resume_round:
                path.unlink()

    def write(self, agents: Sequence[AgentRound], round_idx: int, epoch: int) -> None:
        """Write one round's samples; the file appears complete or not at all.

        Raises:
            MetricsError: the disk is full or not writable.
        """
        path = self._folder / f"round_{round_idx:08d}.parquet"
        aside = path.with_suffix(".tmp")
        table = pa.Table.from_pydict(_columns(agents, round_idx, epoch), schema=SCHEMA)
        try:
            pq.write_table(table, aside, compression="zstd")
            os.replace(aside, path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise MetricsError(
                f"rollouts could not be written to {path}: {error}. Free space, then resume"
            ) from error


def _columns(agents: Sequence[AgentRound], round_idx: int, epoch: int) -> dict[str, Any]:
    samples = [sample for own in agents for sample in own.samples]
    completions = [sample.completion for sample in samples]
    versions = np.array([c.weight_version for c in completions])
    return {
        "round": np.full(len(samples), round_idx),
        "epoch": np.full(len(samples), epoch),
        "item_idx": [s.item_idx for s in samples],
        "turn_idx": [s.turn_idx for s in samples],
        "generation_idx": [s.generation_idx for s in samples],
        "agent_idx": [s.agent_idx for s in samples],
        "prompt": [s.prompt for s in samples],
        "completion": [c.text for c in completions],
        "prompt_tokens": [len(c.prompt_ids) for c in completions],
        "completion_tokens": [len(c.token_ids) for c in completions],
        "finish_reason": [c.finish_reason for c in completions],
        "reward": [s.reward for s in samples],
        "reference_kl": _kl(agents),
        "value": np.concatenate([own.values for own in agents]),
        "td_target": np.concatenate([own.td_targets for own in agents]),
        "td_error": np.concatenate([own.td_errors for own in agents]),
        "advantage": np.concatenate([own.advantages for own in agents]),
        "expected_return": [s.expected_return for s in samples],
        "weight_version": versions,
        "staleness": round_idx - 1 - versions,
        "engine_logprob": [float(c.logprobs.sum()) for c in completions],
    }


def _kl(agents: Sequence[AgentRound]) -> list[float | None]:
    column: list[float | None] = []
    for own in agents:
        column += [None] * len(own.samples) if own.reference_kl is None else own.reference_kl.tolist()
    return column
