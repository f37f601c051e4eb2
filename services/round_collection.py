"""Collects the rollouts of one update round: which items belong to it, and the evaluations due before some of them.

Owns a round's contents.  It must not know how a round is learned from, nor when.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from pathlib import Path

from actors.generation_group import GenerationGroup, GenerationStats
from actors.rollout import Generate, ItemRef, Rollout, RolloutCollector, items_that_fit
from learners.samples import Sample
from services.checkpoint import CheckpointError, TrainerState
from services.config import ActorCriticConfig
from services.data import Rows
from services.evaluation import Evaluator

_AHEAD_FILE = "collected_ahead.pkl"


@dataclass(slots=True)
class CollectedRound:
    """Rollouts that wait for their update."""

    after: TrainerState
    """Where the run stands once that update is done."""
    rollouts: list[Rollout] = field(default_factory=list)
    evaluations: list[tuple[dict[str, float], int]] = field(default_factory=list)
    """Metrics and their step, of the evaluations that were due between the items."""
    reward_seconds: float = 0.0
    generation: GenerationStats = field(default_factory=GenerationStats)

    def samples(self, num_agents: int) -> list[list[Sample]]:
        """Every agent's, in the order of the items."""
        return [
            [sample for rollout in self.rollouts for sample in rollout.samples[agent]]
            for agent in range(num_agents)
        ]

    def write(self, folder: Path) -> None:
        """Into a checkpoint, for `read_ahead`."""
        (folder / _AHEAD_FILE).write_bytes(pickle.dumps(self))


def read_ahead(checkpoint: Path) -> CollectedRound | None:
    """The round that had been collected, but not learned from, when `checkpoint` was written."""
    path = checkpoint / _AHEAD_FILE
    if not path.is_file():
        return None
    try:
        collected = pickle.loads(path.read_bytes())
    except Exception as error:  # a damaged file may make pickle raise nearly anything
        raise CheckpointError(
            f"{path} cannot be read: {error}. Remove the file, and the round is collected again"
        ) from error
    assert isinstance(collected, CollectedRound)
    return collected


class RoundCollection:
    """Walks the training set, one round after another, one epoch after another."""

    def __init__(
        self,
        args: ActorCriticConfig,
        rows: Rows,
        collector: RolloutCollector,
        generation: GenerationGroup,
        generate: Generate,
        evaluator: Evaluator | None,
    ) -> None:
        self._args, self._rows, self._collector = args, rows, collector
        self._generation, self._generate = generation, generate
        self._evaluator = evaluator if args.eval_interval > 0 else None

    def collect(self, state: TrainerState) -> CollectedRound:
        """The round that follows `state`: what one-at-a-time collection would put into it."""
        after = copy.copy(state)
        collected = CollectedRound(after)
        missing = self._args.rollout_buffer_size
        while missing > 0 and after.next_item < len(self._rows):
            self._evaluate_if_due(collected)
            count = items_that_fit(missing, self._args.num_turns, self._args.num_generations)
            stop = min(after.next_item + count, len(self._rows), self._next_evaluation(after.next_item))
            items = [ItemRef(i, after.epoch, dict(self._rows[i])) for i in range(after.next_item, stop)]
            rollouts, seconds = self._collector.collect(items, self._generate)
            collected.rollouts += rollouts
            collected.reward_seconds += seconds
            collected.generation += self._generation.take_stats()
            missing -= sum(len(rollout.samples[0]) for rollout in rollouts)
            after.next_item = stop
            after.reward_evaluations += sum(rollout.reward_evaluations for rollout in rollouts)
        if after.next_item >= len(self._rows):
            after.epoch, after.next_item = after.epoch + 1, 0
        after.update_round += 1
        return collected

    def _evaluate_if_due(self, collected: CollectedRound) -> None:
        after = collected.after
        if self._evaluator is None or after.next_item % self._args.eval_interval:
            return
        metrics = self._evaluator.run(after.epoch, after.next_item)
        collected.evaluations.append((metrics, after.reward_evaluations))
        self._generation.take_stats()  # evaluation is not part of training's times

    def _next_evaluation(self, item: int) -> int:
        """The next item before which an evaluation is due; rounds are collected up to it."""
        if self._evaluator is None:
            return len(self._rows)
        interval = self._args.eval_interval
        return (item // interval + 1) * interval
