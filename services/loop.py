"""The training loop: collect a round, update every agent, push the weights, write down what happened.

Reads top to bottom.  It owns the run's counters and the moment at which each thing happens; how any of them is done is
another module's.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.rollout import ItemRef, Rollout, RolloutCollector, items_that_fit
from learners.samples import IntArray, Sample
from services.checkpoint import CheckpointStore, TrainerState
from services.config import RunConfig
from services.data import Rows
from services.evaluation import Evaluator
from services.launch import System
from services.learner_group import LearnerLostError, RoundResult
from services.metrics import MetricBuffer, MetricsLogger
from services.metrics_callback import call_metrics_callback
from services.progress import Progress
from services.reporting import round_report
from services.rollout_log import RolloutLog
from services.stop_signals import StopSignals

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 32


@dataclass(slots=True)
class Recorders:
    """Where a run writes down what happens."""

    metrics: MetricsLogger
    rollouts: RolloutLog
    checkpoints: CheckpointStore
    progress: Progress

    def close(self) -> None:
        self.metrics.close()
        self.progress.close()


def push_weights(system: System, probe_ids: Sequence[IntArray], version: int, *, verify: bool) -> float:
    """Bring every engine to the learners' weights as `version`; returns the largest probe difference."""
    learners = system.learners
    snapshots = [learners.snapshot(agent, version, ids) for agent, ids in enumerate(probe_ids)]
    return system.generation.push(snapshots, version, verify=verify)


def make_probes(system: System, prompts: Sequence[str]) -> list[IntArray]:
    """A fixed token sequence per agent to prove weight pushes by: the start of its first training prompt."""
    probes = []
    for tokenizer, prompt in zip(system.tokenizers, prompts, strict=True):
        ids = tokenizer(prompt)["input_ids"][:_PROBE_TOKENS]
        probes.append(np.asarray(ids if len(ids) > 1 else [*ids, *ids, 0, 0][:2], np.int32))
    return probes


class TrainingLoop:
    """Trains until the configured epochs are done, or `max_updates` more update rounds are.

    Args:
        rows: the training set, walked in order, one epoch after another.
        save_learners: fills a checkpoint's folder.
    """

    def __init__(
        self,
        config: RunConfig,
        system: System,
        collector: RolloutCollector,
        rows: Rows,
        recorders: Recorders,
        state: TrainerState,
        *,
        evaluator: Evaluator | None,
        save_learners: Callable[[Path], None],
        metrics_callback: Callable[..., Any] | None,
    ) -> None:
        self._config = config
        self._args = config.args
        self._system = system
        self._collector = collector
        self._rows = rows
        self._to = recorders
        self.state = state
        self._evaluator = evaluator
        self._save_learners = save_learners
        self._metrics_callback = metrics_callback
        self._buffer = MetricBuffer(self._args.logging_steps, state.pending_metrics)
        self._probe_ids = make_probes(system, collector.prompts.first(dict(rows[0])))
        self._updating = False
        # While rollouts are collected, a run may stop at once: they can be collected again.
        self._signals = StopSignals(defer=lambda: self._updating)
        self._checkpointed_round = state.update_round

    def run(self, max_updates: int | None = None) -> None:
        """Train.

        Whatever ends the run early, a callback that raises, a signal, a loss that is not finite, the last finished
        update round is in a checkpoint before the error leaves here.
        """
        stop_at = None if max_updates is None else self.state.update_round + max_updates
        with self._signals:
            try:
                self.push_weights()
                while self.state.epoch < self._args.num_train_epochs:
                    if stop_at is not None and self.state.update_round >= stop_at:
                        self._checkpoint("stopped after the asked number of update rounds")
                        return
                    self._round()
            except BaseException as error:
                self._rescue(error)
                raise
        self._checkpoint("finished")

    def push_weights(self) -> float:
        """Bring every engine to the learners' weights; the version is the number of update rounds."""
        version = self.state.update_round
        verify = version % self._config.engine.verify_push_every == 0
        return push_weights(self._system, self._probe_ids, version, verify=verify)

    def _round(self) -> None:
        """One update round: rollouts up to a full buffer (or the epoch's end), one update, one push."""
        started = time.perf_counter()
        after = copy.copy(
            self.state
        )  # becomes the state once the update is done; until then nothing has happened
        rollouts, reward_seconds = self._collect(after)
        samples = [
            [sample for rollout in rollouts for sample in rollout.samples[agent]]
            for agent in range(self._args.num_agents)
        ]
        result = self._update(samples, after)
        sync_started = time.perf_counter()
        probe_gap = self.push_weights()
        sync = time.perf_counter() - sync_started
        self._report(rollouts, result, probe_gap, started, reward_seconds, sync)
        interval = self._config.checkpoint_interval
        if interval and self.state.update_round % interval == 0:
            self._checkpoint("interval")
        self._signals.raise_if_asked()

    def _collect(self, after: TrainerState) -> tuple[list[Rollout], float]:
        """Rollouts of the items that one-at-a-time collection would put into this round; moves `after` past them."""
        rollouts: list[Rollout] = []
        missing, reward_seconds = self._args.rollout_buffer_size, 0.0
        while missing > 0 and after.next_item < len(self._rows):
            self._evaluate_if_due(after)
            count = items_that_fit(missing, self._args.num_turns, self._args.num_generations)
            stop = min(after.next_item + count, len(self._rows), self._next_evaluation(after.next_item))
            items = [ItemRef(i, after.epoch, dict(self._rows[i])) for i in range(after.next_item, stop)]
            collected, seconds = self._collector.collect(items, self._generate)
            rollouts += collected
            reward_seconds += seconds
            missing -= sum(len(rollout.samples[0]) for rollout in collected)
            after.next_item = stop
            after.reward_evaluations += sum(rollout.reward_evaluations for rollout in collected)
            self._to.progress.items(len(collected))
        if after.next_item >= len(self._rows):
            after.epoch, after.next_item = after.epoch + 1, 0
        after.update_round += 1
        return rollouts, reward_seconds

    def _update(self, samples: list[list[Sample]], after: TrainerState) -> RoundResult:
        """Update every agent; from here on the round has happened, even if one learner refuses its step."""
        self._updating = True
        try:
            return self._system.learners.update(samples, after.update_round - 1)
        finally:
            self.state = after
            self._updating = False

    def _generate(self, prompts: list[list[str]], seeds: list[list[int]]) -> list[Any]:
        return self._system.generation.generate(prompts, seeds, self._system.sampling)

    def _evaluate_if_due(self, after: TrainerState) -> None:
        interval = self._args.eval_interval
        if self._evaluator is None or interval <= 0 or after.next_item % interval:
            return
        metrics = self._evaluator.run(after.epoch, after.next_item)
        self._to.metrics.log(metrics, after.reward_evaluations)
        self._system.generation.take_stats()  # evaluation is not part of training's times

    def _next_evaluation(self, item: int) -> int:
        """The next item before which an evaluation is due; rounds are collected up to it."""
        interval = self._args.eval_interval
        if self._evaluator is None or interval <= 0:
            return len(self._rows)
        return (item // interval + 1) * interval

    def _report(
        self,
        rollouts: list[Rollout],
        result: RoundResult,
        probe_gap: float,
        started: float,
        reward_seconds: float,
        sync_seconds: float,
    ) -> None:
        stats = self._system.generation.take_stats()
        seconds = {
            "generate": stats.seconds,
            "reward": reward_seconds,
            **result.seconds,
            "sync": sync_seconds,
            "wait": stats.wait_seconds + result.seconds.get("wait", 0.0),
            "round": time.perf_counter() - started,
        }
        penalty = self._args.reference_kl_coef if self._args.reference_kl_enabled else None
        report = round_report(result, penalty, stats, seconds, probe_gap)
        if self._metrics_callback is not None:
            samples = [sample for agent in result.agents for sample in agent.samples]
            advantages = np.concatenate([agent.advantages for agent in result.agents])
            report |= call_metrics_callback(self._metrics_callback, samples, advantages.tolist())
        evaluations = sum(rollout.reward_evaluations for rollout in rollouts)
        logged = self._buffer.add(report, evaluations)
        if logged is not None:
            self._to.metrics.log(logged, self.state.reward_evaluations)
        self.state.pending_metrics = self._buffer.state()
        self._to.rollouts.write(result.agents, self.state.update_round, rollouts[0].item.epoch)
        self._to.progress.show(
            {
                "update": str(self.state.update_round),
                "reward": f"{report.get('turn_1/reward_mean', 0.0):.3f}",
                "tokens/s": f"{report['tokens_per_second']:.0f}",
            }
        )

    def _checkpoint(self, reason: str) -> None:
        if self._checkpointed_round == self.state.update_round and self._to.checkpoints.latest() is not None:
            return
        self.state.reason = reason
        path = self._to.checkpoints.write(self.state, self._save_learners)
        self._checkpointed_round = self.state.update_round
        logger.info("checkpoint %s (%s)", path, reason)

    def _rescue(self, error: BaseException) -> None:
        """Leave a checkpoint of the last finished round; a second failure must not hide the first."""
        if isinstance(error, LearnerLostError):
            latest = self._to.checkpoints.latest()
            error.add_note(f"the newest checkpoint is {latest or 'missing: none had been written yet'}")
            return
        try:
            self._checkpoint(f"{type(error).__name__}: {error}")
            run = self._to.checkpoints.folder.parent
            error.add_note(
                f"all {self.state.update_round} finished update rounds are in {self._to.checkpoints.latest()}; "
                f"continue with `greenroom train --resume {run}`"
            )
        except Exception as second:
            error.add_note(f"and no checkpoint could be written: {second}")
