"""Evaluation: a few items, one completion per agent and prompt, no update, training's random streams untouched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.rollout import Generate, ItemRef, RolloutCollector
from services.data import Rows
from services.metrics_callback import call_metrics_callback

_SEED_STREAM = 1 << 32
"""Added to the run's seed, which is below it, so that evaluation and training never share a random stream."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Rolls out the first `num_samples` rows of an evaluation set, `batch_size` of them side by side."""

    collector: RolloutCollector
    rows: Rows
    num_samples: int
    batch_size: int
    generate: Generate
    metrics_callback: Callable[..., Any] | None

    def run(self, epoch: int, before_item: int) -> dict[str, float]:
        """Metrics `eval/turn_k/reward_mean`, `eval/turn_k/expected_return` and `eval/<name>` of the callback's.

        `epoch` and `before_item` say where in training this is: an evaluation repeated there samples the same.
        """
        count = min(self.num_samples, len(self.rows))
        items = [ItemRef(i, epoch, dict(self.rows[i])) for i in range(count)]
        sums: dict[str, list[float]] = defaultdict(list)
        stream = self.collector.reseeded(self.collector.seed + _SEED_STREAM + before_item)
        for start in range(0, count, self.batch_size):
            rollouts, _ = stream.collect(items[start : start + self.batch_size], self.generate)
            for rollout in rollouts:
                samples = [sample for agent in rollout.samples for sample in agent]
                for sample in samples:
                    prefix = f"eval/turn_{sample.turn_idx + 1}"
                    sums[f"{prefix}/reward_mean"].append(sample.reward)
                    sums[f"{prefix}/expected_return"].append(sample.expected_return)
                if self.metrics_callback is not None:
                    for name, value in call_metrics_callback(self.metrics_callback, samples).items():
                        sums[f"eval/{name}"].append(value)
        return {name: sum(values) / len(values) for name, values in sums.items()}
