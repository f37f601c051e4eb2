"""Collects rollouts: many items side by side, turn by turn, as if they had been collected one by one.

Owns the order of prompts, completions, rewards and transitions within a rollout.  It must not know where completions
come from (a `generate` callable), nor what is learned from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actors.generation_worker import PromptTooLongError
from actors.prompts import PromptBuilder
from actors.rewards import Item, RewardFunction
from actors.transitions import Transition
from learners.samples import Completion, FloatArray, Sample


class RolloutError(ValueError):
    """A rollout cannot go on; the message names the item, the agent and the turn."""


Generate = Callable[[list[list[str]], list[list[int]]], list[list[Completion]]]
"""(prompts per agent, seeds per agent) -> completions per agent, in the same order."""


@dataclass(frozen=True, slots=True)
class ItemRef:
    """A dataset row and its place in the run, from which every random stream of its rollout follows."""

    item_idx: int
    epoch: int
    row: Item


@dataclass(slots=True)
class Rollout:
    """All that happened for one item: `samples[agent]` in order of turn, then generation."""

    item: ItemRef
    samples: list[list[Sample]]
    reward_evaluations: int
    """Joint answers scored: turns times generations."""


@dataclass(slots=True)
class _Running:
    item: ItemRef
    turns: list[tuple[list[str], list[list[Completion]], FloatArray]] = field(default_factory=list)

    def prompt_history(self, agent: int) -> list[str]:
        return [prompts[agent] for prompts, _, _ in self.turns]

    def response_history(self, agent: int) -> list[str]:
        return [completions[agent][0].text for _, completions, _ in self.turns]


@dataclass(frozen=True, slots=True)
class RolloutCollector:
    """Rolls out items with the given callbacks.

    `transition` is needed for more than one turn.
    """

    num_agents: int
    num_turns: int
    num_generations: int
    early_termination_threshold: float | None
    prompts: PromptBuilder
    reward: RewardFunction
    transition: Transition | None
    seed: int

    def reseeded(self, seed: int) -> RolloutCollector:
        """The same collector on other random streams."""
        return replace(self, seed=seed)

    def collect(self, items: Sequence[ItemRef], generate: Generate) -> tuple[list[Rollout], float]:
        """Roll out all `items`, side by side within every turn; one rollout per item, in order.

        The second value is the time spent in rewards and transitions, in seconds.

        Which samples an item yields does not depend on the items beside it: each completion is drawn with a seed made
        from the run's seed, epoch, item, turn, agent and generation.
        """
        running = [_Running(item) for item in items]
        active, callback_seconds = running, 0.0
        for turn in range(self.num_turns):
            if not active:
                break
            started = time.perf_counter()
            prompts = [self._prompts(rollout, turn) for rollout in active]
            callback_seconds += time.perf_counter() - started
            completions = self._generate(active, prompts, turn, generate)
            started = time.perf_counter()
            for rollout, item_prompts, item_completions in zip(active, prompts, completions, strict=True):
                texts = [[c.text for c in agent_completions] for agent_completions in item_completions]
                rewards = self.reward(texts, item_prompts, rollout.item.row, rollout.item.item_idx)
                rollout.turns.append((item_prompts, item_completions, rewards))
            callback_seconds += time.perf_counter() - started
            active = [rollout for rollout in active if not self._terminates(rollout.turns[-1][2])]
        return [self._finish(rollout) for rollout in running], callback_seconds

    def _prompts(self, rollout: _Running, turn: int) -> list[str]:
        item = rollout.item
        if turn == 0:
            return self.prompts.first(item.row, item.item_idx)
        assert self.transition is not None
        external = self.transition(
            item=item.row,
            item_idx=item.item_idx,
            prompt_history=[rollout.prompt_history(agent) for agent in range(self.num_agents)],
            response_history=[rollout.response_history(agent) for agent in range(self.num_agents)],
        )
        return self.prompts.later(item.row, external, item.item_idx)

    def _generate(
        self, active: Sequence[_Running], prompts: list[list[str]], turn: int, generate: Generate
    ) -> list[list[list[Completion]]]:
        """`[item][agent][generation]`, out of one call for all items, agents and generations."""
        width = self.num_generations
        copies = range(width)
        flat_prompts = [[p[agent] for p in prompts for _ in copies] for agent in range(self.num_agents)]
        seeds = [
            [seed for r in active for seed in request_seeds(self.seed, r.item, turn, agent, width)]
            for agent in range(self.num_agents)
        ]
        try:
            flat = generate(flat_prompts, seeds)
        except PromptTooLongError as error:
            item = active[error.position // width].item
            raise RolloutError(
                f"item {item.item_idx}, agent {error.agent_idx}, turn {turn + 1}: {error}"
            ) from None
        return [[agent[i * width : (i + 1) * width] for agent in flat] for i in range(len(active))]

    def _terminates(self, rewards: FloatArray) -> bool:
        """Early termination: the turn's mean processed reward over the agents exceeds the threshold."""
        threshold = self.early_termination_threshold
        return threshold is not None and float(rewards.mean()) > threshold

    def _finish(self, rollout: _Running) -> Rollout:
        rewards = np.stack([r for _, _, r in rollout.turns])  # [turn, generation, agent]
        returns = np.cumsum(rewards[::-1], axis=0)[::-1]
        samples: list[list[Sample]] = [[] for _ in range(self.num_agents)]
        last = len(rollout.turns) - 1
        for turn, (prompts, completions, _) in enumerate(rollout.turns):
            for agent, own in enumerate(samples):
                own += [
                    Sample(
                        agent_idx=agent,
                        item_idx=rollout.item.item_idx,
                        turn_idx=turn,
                        generation_idx=generation,
                        prompt=prompts[agent],
                        completion=completions[agent][generation],
                        reward=float(rewards[turn, generation, agent]),
                        is_final_turn=turn == last,
                        expected_return=float(returns[turn, generation, agent]),
                        metadata={
                            "turn_idx": turn,
                            "generation_idx": generation,
                            "batch_item": rollout.item.row,
                        },
                    )
                    for generation in range(self.num_generations)
                ]
        return Rollout(rollout.item, samples, rewards.shape[0] * rewards.shape[1])


def request_seeds(seed: int, item: ItemRef, turn: int, agent: int, generations: int) -> list[int]:
    """63-bit engine seeds, one per generation, that only these completions of this run use."""
    words = np.random.SeedSequence([seed, item.epoch, item.item_idx, turn, agent])
    return [int(state >> 1) for state in words.generate_state(generations, np.uint64)]


def items_that_fit(missing: int, num_turns: int, num_generations: int) -> int:
    """How many further items surely belong to the running update round.

    An update starts once an agent's buffer holds `rollout_buffer_size` samples, `missing` of which are not there yet.
    An item yields at most `num_turns * num_generations` of them, so this many items would be collected before that
    update even one at a time; collecting them side by side changes nothing.
    """
    return -(-missing // (num_turns * num_generations)) if missing > 0 else 0
