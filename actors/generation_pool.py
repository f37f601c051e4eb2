"""One agent's generation workers as Ray actors: shares prompts among them, pushes weights, survives their deaths.

Ray restarts a dead worker; this module brings the restarted one back to the current weights and samples the lost
prompts again.  Every completion depends on its own seed alone, so a recovered run samples what it would have sampled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError

from actors.engine import Sampling
from actors.generation_worker import EngineSpec, GenerationWorker, PromptTooLongError
from actors.limits import WaitLimitError
from actors.recovery import recovering
from actors.weights import StaleWeightsError
from learners.samples import Completion, CompletionBatch
from learners.snapshot import WeightTransferError

logger = logging.getLogger(__name__)

_MAX_RECOVERIES = 3

WeightSource = Callable[[Sequence[Any], int], Any]
"""One version of an agent's weights: given workers that are to load it, and a number that changes when a worker has
become another process, a reference to the snapshot that they are to be pushed."""


class WorkerLostError(RuntimeError):
    """A generation worker kept dying."""


@dataclass(slots=True)
class PendingGeneration:
    """Prompts on their way through an agent's workers."""

    prompts: Sequence[str]
    sampling: Sampling
    seeds: Sequence[int]
    version: int
    shards: list[slice]
    workers: list[Any]
    """Which of them has which shard."""
    refs: list[Any]
    limit_s: float


class GenerationPool:
    """The `workers_per_agent` replicas of one agent.

    Args:
        agent_idx: named in errors.
        spec: how each worker builds its engine.
        actor_options: Ray options of each worker (resources, placement), one dict per worker.
        start_timeout_s, generate_timeout_s: limits of every wait.
    """

    def __init__(
        self,
        agent_idx: int,
        spec: EngineSpec,
        actor_options: Sequence[dict[str, Any]],
        *,
        start_timeout_s: float,
        generate_timeout_s: float,
    ) -> None:
        self._agent_idx = agent_idx
        self._start_timeout_s = start_timeout_s
        self._generate_timeout_s = generate_timeout_s
        self._spec = spec
        self.workers = [self._start(options) for options in actor_options]
        self._planned = len(self.workers)
        """For those there is a place; the ones after them are there as long as their nodes are."""
        self._weights: WeightSource | None = None  # None: those that the engines started with, version 0
        self._incarnation = 0
        self._processes: dict[Any, str] = {}
        """The process that each worker was last seen in."""
        self._killed: set[str] = set()
        self._version = 0
        self.recoveries = 0

    def wait_ready(self) -> None:
        """Wait until every engine is up."""
        for index, worker in enumerate(self.workers):
            self._await_process(worker, index, "the engine to start")

    def resize(self, actor_options: Sequence[dict[str, Any]]) -> None:
        """Go on with `len(actor_options)` workers: the last ones end, or new ones start with the present weights.

        Only between two calls of generation.  If a new worker does not come up, all are as before.

        Raises:
            WorkerLostError, WaitLimitError: a new worker died, or was not ready in time.
        """
        count, before = len(actor_options), len(self.workers)
        self._end(self.workers[count:])
        del self.workers[count:]
        try:
            self.workers += [self._start(options) for options in actor_options[before:]]
            for index in range(before, count):
                self._bring_up(index, "the engine to start")
        except BaseException:
            self._end(self.workers[before:])
            del self.workers[before:]
            raise

    def push(self, weights: WeightSource, version: int, *, verify: bool) -> list[Any]:
        """Start pushing new weights to all workers; `confirm` waits for it."""
        self._weights, self._version = weights, version
        snapshot = weights(self.workers, self._incarnation)
        return [worker.push.remote(snapshot, verify) for worker in self.workers]

    def confirm(self, refs: Sequence[Any]) -> float:
        """Wait for a push; returns the largest probe difference. A worker lost meanwhile is brought back first.

        Raises:
            WaitLimitError: a worker did not load in time, and its replacement was not there in time either.
        """
        gaps = []
        for index, (worker, ref) in enumerate(zip(list(self.workers), refs, strict=True)):
            try:
                gaps.append(self._wait(ref, self._generate_timeout_s, index, "new weights to load"))
            except (RayActorError, WaitLimitError, WeightTransferError) as error:
                if index >= self._planned:
                    self._let_go(worker, index, error)
                elif isinstance(error, RayActorError):
                    gaps.append(self._recover(index, error))
                else:
                    gaps.append(self._replace(index, error))
        return max(gaps, default=0.0)

    def submit(self, prompts: Sequence[str], sampling: Sampling, seeds: Sequence[int]) -> PendingGeneration:
        """Start sampling one completion per prompt, shared among the workers as evenly as can be."""
        count = min(len(self.workers), len(prompts))
        bounds = [len(prompts) * k // count for k in range(count + 1)] if count else [0]
        shards = [slice(a, b) for a, b in pairwise(bounds)]
        pending = PendingGeneration(
            prompts,
            sampling,
            seeds,
            self._version,
            shards,
            self.workers[:count],
            [],
            self._generate_timeout_s,
        )
        pending.refs = [self._send(pending, index) for index in range(len(shards))]
        return pending

    def gather(self, pending: PendingGeneration) -> list[Completion]:
        """Completions in the order of the prompts.

        Raises:
            WorkerLostError: a worker died again and again.
            WaitLimitError: a worker did not answer within the limit, twice.
        """
        completions: list[Completion] = []
        for index in range(len(pending.shards)):
            completions += self._gather_shard(pending, index)
        return completions

    def shutdown(self) -> None:
        """End the engines, then the actors; a worker that does not answer is killed all the same."""
        self._end(self.workers)

    def _start(self, options: dict[str, Any]) -> Any:
        actor = ray.remote(GenerationWorker)
        return actor.options(max_restarts=-1, max_task_retries=0, **options).remote(self._spec)

    @staticmethod
    def _end(workers: Sequence[Any]) -> None:
        ending = [worker.shutdown.remote() for worker in workers]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=10)
        for worker in workers:
            ray.kill(worker, no_restart=True)

    def _send(self, pending: PendingGeneration, index: int) -> Any:
        shard = pending.shards[index]
        return pending.workers[index].generate.remote(
            list(pending.prompts[shard]), pending.sampling, list(pending.seeds[shard]), pending.version
        )

    def _gather_shard(self, pending: PendingGeneration, index: int) -> list[Completion]:
        ref = pending.refs[index]
        for attempt in range(_MAX_RECOVERIES + 1):
            try:
                batch: CompletionBatch = self._wait(ref, self._generate_timeout_s, index, "completions")
                return batch.unpack()
            except PromptTooLongError as error:
                raise error.moved(pending.shards[index].start) from None
            except (RayActorError, StaleWeightsError, ObjectLostError) as error:
                # What a worker answered may be lost with its node before it is fetched.
                cause = error
                if attempt < _MAX_RECOVERIES:
                    ref = self._again(pending, index, error)
            except WaitLimitError as error:
                if attempt:  # a second new process would hang as well
                    raise
                ref = self._again(pending, index, error)
        raise WorkerLostError(
            f"generation worker {index} of agent {self._agent_idx} died {_MAX_RECOVERIES + 1} times while it sampled "
            f"the same prompts; last cause: {cause}. Out of memory is the usual reason: lower "
            "engine.kv_cache_memory_mib or args.rollout_buffer_size, or give the worker more memory."
        ) from cause

    def _again(self, pending: PendingGeneration, index: int, error: Exception) -> Any:
        """Have a shard sampled once more: by its worker's next process, or by another worker if there will be none."""
        worker, planned = pending.workers[index], self.workers[: self._planned]
        if worker not in planned:
            self._let_go(worker, index, error)
            pending.workers[index] = planned[index % len(planned)]
        elif isinstance(error, WaitLimitError):
            self._replace(planned.index(worker), error)
        else:
            self._recover(planned.index(worker), error)
        return self._send(pending, index)

    def _let_go(self, worker: Any, index: int, error: Exception) -> None:
        """Go on without a worker beyond the planned ones, whose node may have left for good."""
        left = len(self.workers) - 1
        logger.warning(
            "generation worker %d of agent %d was lost (%s); going on with %d",
            index,
            self._agent_idx,
            error,
            left,
        )
        self.workers.remove(worker)
        ray.kill(worker, no_restart=True)

    def _replace(self, index: int, error: Exception) -> float:
        """Put a new process in the place of a worker that hangs, or was left half-way between two versions."""
        self._kill(self.workers[index])
        return self._recover(index, error)

    def _recover(self, index: int, error: Exception) -> float:
        """Wait for Ray's replacement of a worker and bring it to the current weights; returns the probe difference."""
        self.recoveries += 1
        what = f"generation worker {index} of agent {self._agent_idx}"
        with recovering(what, error, f"restarting it with weight version {self._version}"):
            return self._bring_up(index, "the engine to restart")

    def _bring_up(self, index: int, what: str) -> float:
        """Wait until a worker that is starting is up, and bring it to the current weights."""
        worker = self.workers[index]
        attempt = 0
        while True:
            try:
                self._await_process(worker, index, what)
                self._incarnation += 1
                if self._weights is None:
                    return 0.0
                push = worker.push.remote(self._weights([worker], self._incarnation), True)
                gap: float = self._wait(push, self._generate_timeout_s, index, "weights to load")
                return gap
            except (RayActorError, WeightTransferError) as again:
                attempt += 1
                if isinstance(again, WeightTransferError):
                    self._kill(worker)
                if attempt > _MAX_RECOVERIES:
                    raise WorkerLostError(
                        f"generation worker {index} of agent {self._agent_idx} could not be started: {again}"
                    ) from again

    def _kill(self, worker: Any) -> None:
        """Have Ray put another process in the place of a worker's."""
        self._killed.add(self._processes.get(worker, ""))
        ray.kill(worker, no_restart=False)

    def _await_process(self, worker: Any, index: int, what: str) -> None:
        """Wait until a worker is up; a process that has been killed may still answer for a moment."""
        left = self._start_timeout_s
        end = time.monotonic() + left
        while True:
            found = self._wait(worker.ready.remote(), left, index, what)
            self._processes[worker] = found["process"]
            if found["process"] not in self._killed:
                return
            time.sleep(0.2)
            left = max(0.0, end - time.monotonic())

    def _wait(self, ref: Any, seconds: float, index: int, what: str) -> Any:
        try:
            return ray.get(ref, timeout=seconds)
        except GetTimeoutError:
            raise WaitLimitError(
                f"waited {seconds:g} s for {what} of generation worker {index}, agent {self._agent_idx}; it is still "
                "not there. Raise engine.start_timeout_s or engine.generate_timeout_s if the model needs longer."
            ) from None
