"""Where metrics go: metrics.jsonl, TensorBoard, and Weights & Biases where it is asked for.

Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from services.config import WandbConfig
from services.run_folder import RunFolder

EVALUATION_PREFIX = "eval/"


def is_evaluation(entry: Mapping[str, Any]) -> bool:
    """Whether a line of metrics is an evaluation that stands before the round which begins at its step.

    SMARL evaluates at a round's end and logs both in one line; that is none.
    """
    return all(name.startswith(EVALUATION_PREFIX) for name in entry if name not in ("step", "time"))


COUNT_PREFIX = "count/"


class MetricsError(RuntimeError):
    """Metrics could not be written."""


class MetricsLogger:
    """Writes every log everywhere at once.

    Args:
        resume_step: the counter of the checkpoint that a run continues from; None for a new run.  What had been logged
            after that checkpoint is dropped, because it is going to happen again.
    """

    def __init__(self, run: RunFolder, wandb_config: WandbConfig | None, *, resume_step: int | None) -> None:
        self._path = run.metrics_file
        if resume_step is not None and self._path.exists():
            self._drop_after(resume_step)
        self._file = self._path.open("a")
        purge = None if resume_step is None else resume_step + 1
        self._tensorboard = SummaryWriter(str(run.tensorboard), purge_step=purge)
        self._wandb = (
            None if wandb_config is None else _start_wandb(run, wandb_config, resume_step is not None)
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One line of metrics at `step`, the number of joint-action reward evaluations so far.

        Raises:
            MetricsError: the disk is full or not writable.
        """
        try:
            self._file.write(json.dumps({"step": step, "time": time.time(), **metrics}) + "\n")
            self._file.flush()
            # One event: its writer lets each one wait while ten others do, and many agents have thousands of metrics.
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            self._tensorboard.file_writer.add_summary(Summary(value=values), step)
            self._tensorboard.flush()
        except OSError as error:
            raise MetricsError(
                f"metrics could not be written to {self._path}: {error}. Free space, then continue with "
                f"`greenroom train --resume {self._path.parent}`"
            ) from error
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish all logs; safe to call twice."""
        if not self._file.closed:
            self._file.close()
            self._tensorboard.close()
            if self._wandb is not None:
                self._wandb.finish()

    def _drop_after(self, step: int) -> None:
        """Keep what a run that stopped at `step` had logged; the evaluation due there is run again."""
        kept = []
        for line in self._path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                break  # a line cut off when the process died
            again = entry["step"] == step and is_evaluation(entry)
            if entry["step"] <= step and not again:
                kept.append(line + "\n")
        aside = self._path.with_suffix(".tmp")
        aside.write_text("".join(kept))
        aside.replace(self._path)


class MetricBuffer:
    """Gathers metrics until `logging_steps` joint answers have been scored since the last log.

    Means are weighted by the joint answers each addition stands for; names that end in `_max` keep the largest value,
    names that start with `count/` are summed.
    """

    def __init__(self, logging_steps: int, state: Mapping[str, Any]) -> None:
        self._logging_steps = logging_steps
        self._evaluations: int = state.get("evaluations", 0)
        self._sums: dict[str, float] = dict(state.get("sums", {}))
        self._weights: dict[str, float] = dict(state.get("weights", {}))

    def add(self, metrics: Mapping[str, float], evaluations: int) -> dict[str, float] | None:
        """Take in metrics of `evaluations` joint answers; returns what to log once enough came in."""
        self._evaluations += evaluations
        for name, value in metrics.items():
            if name.endswith("_max"):
                self._sums[name] = max(self._sums.get(name, value), value)
            elif name.startswith(COUNT_PREFIX):
                self._sums[name] = self._sums.get(name, 0.0) + value
            else:
                self._sums[name] = self._sums.get(name, 0.0) + value * evaluations
                self._weights[name] = self._weights.get(name, 0.0) + evaluations
        if self._evaluations < self._logging_steps:
            return None
        logged = {name: value / self._weights.get(name, 1.0) for name, value in self._sums.items()}
        self._evaluations, self._sums, self._weights = 0, {}, {}
        return logged

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to log the same numbers; plain JSON."""
        return {"evaluations": self._evaluations, "sums": dict(self._sums), "weights": dict(self._weights)}


def _start_wandb(run: RunFolder, config: WandbConfig, resuming: bool) -> Any:
    import wandb

    return wandb.init(
        project=config.project,
        entity=config.entity,
        name=config.name or run.path.name,
        mode=config.mode,
        dir=config.dir or str(run.path),
        tags=config.tags,
        id=run.path.name if config.mode == "online" else None,
        resume="allow" if resuming and config.mode == "online" else None,
    )
