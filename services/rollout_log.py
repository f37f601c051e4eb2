"""Every sample of a run on disk, one parquet file per update round, readable as one data set."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

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
        rows = [row for own in agents for row in _rows(own, round_idx, epoch)]
        try:
            pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), aside, compression="zstd")
            os.replace(aside, path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise MetricsError(
                f"rollouts could not be written to {path}: {error}. Free space, then resume"
            ) from error


def _rows(own: AgentRound, round_idx: int, epoch: int) -> Iterator[dict[str, Any]]:
    for index, sample in enumerate(own.samples):
        completion = sample.completion
        yield {
            "round": round_idx,
            "epoch": epoch,
            "item_idx": sample.item_idx,
            "turn_idx": sample.turn_idx,
            "generation_idx": sample.generation_idx,
            "agent_idx": sample.agent_idx,
            "prompt": sample.prompt,
            "completion": completion.text,
            "prompt_tokens": len(completion.prompt_ids),
            "completion_tokens": len(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "reward": sample.reward,
            "reference_kl": None if own.reference_kl is None else float(own.reference_kl[index]),
            "value": float(own.values[index]),
            "td_target": float(own.td_targets[index]),
            "td_error": float(own.td_errors[index]),
            "advantage": float(own.advantages[index]),
            "expected_return": sample.expected_return,
            "weight_version": completion.weight_version,
            "staleness": round_idx - 1 - completion.weight_version,
            "engine_logprob": float(completion.logprobs.sum()),
        }
