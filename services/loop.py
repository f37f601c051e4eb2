"""The training loop: collect a round, update every agent, push the weights, write down what happened.

Reads top to bottom.  It owns the run's counters and the moment at which each thing happens; how any of them is done is
another module's.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.generation_pool import WorkerLostError
from actors.limits import WaitLimitError
from learners.samples import IntArray
from services.checkpoint import AfterRound, CheckpointStore, TrainerState
from services.config import RunConfig
from services.launch import System
from services.learner_group import LearnerLostError, RoundResult
from services.metrics import MetricBuffer, MetricsLogger
from services.metrics_callback import call_metrics_callback
from services.progress import Progress
from services.reporting import round_report, staleness
from services.rollout_log import RolloutLog
from services.round_collection import CollectedRound, RoundCollection
from services.stop_signals import StopSignals

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 32


@contextmanager
def _start_left_alone_by_gc() -> Iterator[None]:
    """Keep the garbage collector off what has been loaded so far; looking through all of it takes a fifth of a second,
    again and again, while every engine waits."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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


def start_push(
    system: System, probe_ids: Sequence[IntArray], version: int, *, verify: bool
) -> Callable[[], float]:
    """Begin to bring every engine to the learners' weights as `version`.

    Returns:
        Waits until all have them, and returns the largest probe difference.
    """
    learners = system.learners
    weights = [learners.weights(agent, version, ids) for agent, ids in enumerate(probe_ids)]
    started = system.generation.push(weights, version, verify=verify)
    return lambda: system.generation.confirm(started)


def make_probes(system: System, prompts: Sequence[str]) -> list[IntArray]:
    """A fixed token sequence per agent to prove weight pushes by: the start of its first training prompt."""
    probes = []
    for tokenizer, prompt in zip(system.tokenizers, prompts, strict=True):
        ids = tokenizer(prompt)["input_ids"][:_PROBE_TOKENS]
        probes.append(np.asarray(ids if len(ids) > 1 else [*ids, *ids, 0, 0][:2], np.int32))
    return probes


class TrainingLoop:
    """Trains until the configured epochs are done, or a number of update rounds.

    Args:
        probes: a token sequence per agent, see `make_probes`.
        ahead: rollouts of the first round, where they have been collected before.
        save_learners: fills a checkpoint's folder.
        workers_wanted: how many generation workers per agent have been asked for since it was last called, or None.
    """

    def __init__(
        self,
        config: RunConfig,
        system: System,
        rounds: RoundCollection,
        probes: Sequence[IntArray],
        recorders: Recorders,
        state: TrainerState,
        *,
        ahead: CollectedRound | None,
        save_learners: Callable[[Path], None],
        metrics_callback: Callable[..., Any] | None,
        workers_wanted: Callable[[], int | None],
    ) -> None:
        self._config = config
        self._args = config.args
        self._system = system
        self._rounds = rounds
        self._ahead = ahead
        self._to = recorders
        self.state = state
        self._save_learners = save_learners
        self._metrics_callback = metrics_callback
        self._workers_wanted = workers_wanted
        self._most_workers = config.engine.max_workers_per_agent
        self._crowded = False
        """Whether somebody asked for so many, even if the cluster has no more room."""
        self._buffer = MetricBuffer(self._args.logging_steps, state.pending_metrics)
        self._probe_ids = probes
        self._pending: Future[RoundResult] | None = None
        """The update that runs."""
        # While rollouts alone are collected, a run may stop at once: they can be collected again.
        self._signals = StopSignals(defer=lambda: self._pending is not None)
        self._checkpointed_round = state.update_round

    def run(self, stop_at: int | None = None, after_round: AfterRound | None = None) -> None:
        """Train, until `stop_at` update rounds are done at most.

        Whatever ends the run early, a callback that raises, a signal, a loss that is not finite, the last finished
        update round is in a checkpoint before the error leaves here.
        """
        with self._signals, _start_left_alone_by_gc():
            try:
                self._start_push()()
                while self.state.epoch < self._args.num_train_epochs:
                    if stop_at is not None and self.state.update_round >= stop_at:
                        self._checkpoint("stopped after the asked number of update rounds")
                        return
                    self._scale()
                    self._round()
                    if after_round is not None:
                        after_round(lambda: self._checkpoint("asked for"))
            except BaseException as error:
                self._rescue(error)
                raise
        self._checkpoint("finished")

    def _start_push(self) -> Callable[[], float]:
        """Begin to bring every engine to the learners' weights; the version is the number of update rounds."""
        version = self.state.update_round
        verify = version % self._config.engine.verify_push_every == 0
        return start_push(self._system, self._probe_ids, version, verify=verify)

    def _scale(self) -> None:
        """As many generation workers as somebody asked for, or as nodes that joined have room for.

        Their number changes no completion, so a wish that fails does not end the run.
        """
        system, wish = self._system, self._workers_wanted()
        if wish is not None:
            self._most_workers, self._crowded = wish, True
        most, present = self._most_workers, system.workers_per_agent
        if most is None or most == present:
            return
        try:
            if wish is not None:
                system.scale(most)
            elif not system.grow(most, crowded=self._crowded):
                return
        except (WorkerLostError, WaitLimitError) as error:
            logger.warning(
                "%d generation workers per agent as before, until `greenroom scale` asks for more: %s",
                system.workers_per_agent,
                error,
            )
            self._most_workers = None
            return
        count = system.workers_per_agent
        logger.info("update round %d: %d generation workers per agent", self.state.update_round, count)

    def _round(self) -> None:
        """One update round: rollouts up to a full buffer (or the epoch's end), one update, one push.

        Where staleness is allowed, the next round's rollouts are collected while the update runs.
        """
        started = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        collected = ahead or self._rounds.collect(self.state)
        for metrics, step in collected.evaluations:
            self._to.metrics.log(metrics, step)
        result, trouble = self._update(collected)
        self._to.progress.items(len(collected.rollouts))
        sync_started = time.perf_counter()
        confirm_push = self._start_push()
        sync = time.perf_counter() - sync_started
        # While the weights are on their way:
        self._to.rollouts.write(result.agents, self.state.update_round, collected.rollouts[0].item.epoch)
        sync_started = time.perf_counter()
        probe_gap = confirm_push()
        sync += time.perf_counter() - sync_started
        here = [each for each in (None if ahead else collected, self._ahead) if each is not None]
        generating = sum(each.generation.seconds for each in here)
        self._report(collected, result, probe_gap, started, generating, sync)
        interval = self._config.checkpoint_interval
        if interval and self.state.update_round % interval == 0:
            self._checkpoint("interval")
        if trouble is not None:
            raise trouble
        self._signals.raise_if_asked()

    def _update(self, collected: CollectedRound) -> tuple[RoundResult, Exception | None]:
        """Update every agent; once begun the round has happened, even if one learner refuses its step.

        The update runs in a thread; this one collects the next round meanwhile, or waits.  The update is over when this
        returns or raises, unless a second signal does not wait for it.

        Returns:
            What the update did, and what went wrong with the next round's collection meanwhile.
        """
        samples = collected.samples(self._args.num_agents)
        background = ThreadPoolExecutor(1, "update")
        pending = background.submit(self._system.learners.update, samples, collected.after.update_round - 1)
        self._pending = pending
        background.shutdown(wait=False)  # the thread ends with the update
        trouble: Exception | None = None
        try:
            if self._config.max_staleness and collected.after.epoch < self._args.num_train_epochs:
                self._ahead = self._rounds.collect(collected.after)
        except Exception as error:
            trouble = error
        wait([pending])  # its own waits have limits
        collected.after.pending_metrics = self.state.pending_metrics
        self.state = collected.after
        self._pending = None
        failed = pending.exception()
        if failed is not None:
            raise failed from trouble
        return pending.result(), trouble

    def _report(
        self,
        collected: CollectedRound,
        result: RoundResult,
        probe_gap: float,
        started: float,
        generating: float,
        sync_seconds: float,
    ) -> None:
        stats, took = collected.generation, time.perf_counter() - started
        seconds = {
            "generate": stats.seconds,
            "reward": collected.reward_seconds,
            **result.seconds,
            "sync": sync_seconds,
            "wait": stats.wait_seconds + result.seconds.get("wait", 0.0),
            "round": took,
        }
        penalty = self._args.reference_kl_coef if self._args.reference_kl_enabled else None
        report = round_report(result, penalty, stats, seconds, probe_gap)
        report |= staleness(result.agents, self.state.update_round)
        learning = sum(result.seconds[part] for part in ("value", "update"))
        report |= {"idle/engines": 1 - generating / took, "idle/learners": 1 - learning / took}
        if self._metrics_callback is not None:
            samples = [sample for agent in result.agents for sample in agent.samples]
            advantages = np.concatenate([agent.advantages for agent in result.agents])
            report |= call_metrics_callback(self._metrics_callback, samples, advantages.tolist())
        evaluations = sum(rollout.reward_evaluations for rollout in collected.rollouts)
        logged = self._buffer.add(report, evaluations)
        if logged is not None:
            self._to.metrics.log(logged, self.state.reward_evaluations)
        self.state.pending_metrics = self._buffer.state()
        self._to.progress.show(
            {
                "update": str(self.state.update_round),
                "reward": f"{report.get('turn_1/reward_mean', 0.0):.3f}",
                "tokens/s": f"{report['tokens_per_second']:.0f}",
            }
        )

    def _checkpoint(self, reason: str) -> Path:
        latest = self._to.checkpoints.latest()
        if self._checkpointed_round == self.state.update_round and latest is not None:
            return latest
        self.state.reason = reason
        path = self._to.checkpoints.write(self.state, self._fill)
        self._checkpointed_round = self.state.update_round
        logger.info("checkpoint %s (%s)", path, reason)
        return path

    def _fill(self, folder: Path) -> None:
        self._save_learners(folder)
        if self._ahead is not None:
            self._ahead.write(folder)

    def _rescue(self, error: BaseException) -> None:
        """Leave a checkpoint of the last finished round; a second failure must not hide the first."""
        if (
            isinstance(error, LearnerLostError) or self._pending is not None
        ):  # learners in the middle of an update
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
