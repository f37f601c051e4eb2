"""All agents' generation workers: samples for every agent at once, and keeps every agent's weights current."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import ray

from actors.engine import Sampling
from actors.generation_pool import GenerationPool, PendingGeneration, WeightSource
from actors.generation_worker import PromptTooLongError
from learners.samples import Completion

PendingPush = tuple[GenerationPool, list[Any]]
"""A pool and what it waits for."""


@dataclass(slots=True)
class GenerationStats:
    """What generation cost since it was last asked."""

    seconds: float = 0.0
    wait_seconds: float = 0.0
    """Part of `seconds` in which at least one engine had finished and waited for a slower one."""
    tokens: int = 0
    prompts: int = 0

    def __add__(self, other: GenerationStats) -> GenerationStats:
        return GenerationStats(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(GenerationStats))
        )


class GenerationGroup:
    """One pool per agent, in agent order."""

    def __init__(self, pools: Sequence[GenerationPool]) -> None:
        self.pools = list(pools)
        self._stats = GenerationStats()

    def wait_ready(self) -> None:
        for pool in self.pools:
            pool.wait_ready()

    def resize(self, actor_options: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Change how many workers each agent has; see `GenerationPool.resize`."""
        for pool, options in zip(self.pools, actor_options, strict=True):
            pool.resize(options)

    def generate(
        self, prompts: Sequence[Sequence[str]], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """`completions[agent][k]` for `prompts[agent][k]`; all agents' engines work at the same time.

        Raises:
            PromptTooLongError: `agent_idx` and `position` say which prompt.
        """
        started = time.perf_counter()
        pending = [
            pool.submit(own, sampling, own_seeds)
            for pool, own, own_seeds in zip(self.pools, prompts, seeds, strict=True)
        ]
        first_done = self._wait_for_first(pending, started)
        completions = []
        for agent, (pool, waiting) in enumerate(zip(self.pools, pending, strict=True)):
            try:
                completions.append(pool.gather(waiting))
            except PromptTooLongError as error:
                raise error.of_agent(agent) from None
        finished = time.perf_counter()
        self._stats.seconds += finished - started
        self._stats.wait_seconds += finished - first_done
        self._stats.prompts += sum(len(own) for own in prompts)
        self._stats.tokens += sum(len(c.token_ids) for own in completions for c in own)
        return completions

    def push(
        self, weights: Sequence[WeightSource | None], version: int, *, verify: bool
    ) -> list[PendingPush]:
        """Start to bring every agent that has new weights (None: unchanged) to `version`; `confirm` waits for it."""
        return [
            (pool, pool.push(source, version, verify=verify))
            for pool, source in zip(self.pools, weights, strict=True)
            if source is not None
        ]

    def confirm(self, started: Sequence[PendingPush]) -> float:
        """Wait for a push.

        Returns:
            The largest probe difference of any engine; 0 without verification.
        """
        return max((pool.confirm(refs) for pool, refs in started), default=0.0)

    def take_stats(self) -> GenerationStats:
        """What has been counted since the last call."""
        stats, self._stats = self._stats, GenerationStats()
        return stats

    def shutdown(self) -> None:
        for pool in self.pools:
            pool.shutdown()

    @staticmethod
    def _wait_for_first(pending: Sequence[PendingGeneration], started: float) -> float:
        """When the first engine was done; limits are enforced by `gather`."""
        refs = [ref for waiting in pending for ref in waiting.refs]
        if not refs:
            return started
        ray.wait(refs, num_returns=1, timeout=pending[0].limit_s, fetch_local=False)
        return time.perf_counter()
