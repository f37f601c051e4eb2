"""Items rolled out side by side are the items rolled out one at a time."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.generation_worker import PromptTooLongError
from actors.prompts import PromptBuilder
from actors.rewards import RewardFunction
from actors.rollout import ItemRef, Rollout, RolloutCollector, RolloutError, items_that_fit, request_seeds
from actors.transitions import Transition
from learners.samples import Completion

Calls = list[list[list[str]]]


def answer(prompt: str, seed: int, agent: int) -> Completion:
    """A completion that depends on prompt, seed and agent alone, as an engine's does."""
    digest = hashlib.sha256(f"{agent}|{prompt}|{seed}".encode()).digest()
    ids = np.frombuffer(digest[: 1 + digest[0] % 7], np.uint8).astype(np.int32)
    return Completion(
        np.array([1, 2], np.int32), ids, -np.ones(len(ids), np.float32), digest.hex()[:8], "stop", 0
    )


def generate_into(calls: Calls) -> Any:
    def generate(prompts: list[list[str]], seeds: list[list[int]]) -> list[list[Completion]]:
        calls.append(prompts)
        return [
            [answer(p, s, agent) for p, s in zip(own, own_seeds, strict=True)]
            for agent, (own, own_seeds) in enumerate(zip(prompts, seeds, strict=True))
        ]

    return generate


def hashed_reward(*lists: list[str]) -> list[float]:
    """One reward in [-1, 1) per agent, or per generation where there are several."""
    texts = (
        ["".join(parts) for parts in zip(*lists, strict=True)]
        if len(lists[0]) > 1
        else [own[0] for own in lists]
    )
    return [int(hashlib.md5(text.encode()).hexdigest()[:6], 16) / 2**23 - 1 for text in texts]


def transition(prompt: str, agent_completions: list[str], num_agents: int, **history: Any) -> list[str]:
    turn = len(history["prompt_history_per_agent"][0])
    return [f"{prompt}/{turn}/{agent_completions[(i + 1) % num_agents]}" for i in range(num_agents)]


def collector(
    *, agents: int = 2, turns: int = 1, generations: int = 1, threshold: float | None = None, seed: int = 0
) -> RolloutCollector:
    return RolloutCollector(
        num_agents=agents,
        num_turns=turns,
        num_generations=generations,
        early_termination_threshold=threshold,
        prompts=PromptBuilder(None, agents, passthrough=False),
        reward=RewardFunction(hashed_reward, None, num_agents=agents, timeout_s=30),
        transition=Transition(transition, num_agents=agents, timeout_s=30),
        seed=seed,
    )


def items(count: int, epoch: int = 0) -> list[ItemRef]:
    return [ItemRef(i, epoch, {"prompt": f"item {i}"}) for i in range(count)]


def plain(rollout: Rollout) -> Any:
    return [
        [
            (
                s.agent_idx, s.item_idx, s.turn_idx, s.generation_idx, s.prompt, s.completion.text,
                s.completion.token_ids.tolist(), s.reward, s.is_final_turn, s.expected_return,
            )
            for s in own
        ]
        for own in rollout.samples
    ]  # fmt: skip


shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)).map(
    lambda s: s if s[1] == 1 else (s[0], s[1], 1)  # several turns go with one generation
)


@given(
    shape=shapes,
    threshold=st.none() | st.floats(-0.8, 0.8),
    cuts=st.sets(st.integers(1, 6)),
    seed=st.integers(0, 9),
)
def test_side_by_side_equals_one_at_a_time(
    shape: tuple[int, int, int], threshold: float | None, cuts: set[int], seed: int
) -> None:
    agents, turns, generations = shape
    own = collector(agents=agents, turns=turns, generations=generations, threshold=threshold, seed=seed)
    everything = items(7)
    one_by_one = [plain(own.collect([item], generate_into([]))[0][0]) for item in everything]
    bounds = [0, *sorted(cuts), 7]
    chunked: list[Any] = []
    for start, stop in itertools.pairwise(bounds):
        rollouts, _ = own.collect(everything[start:stop], generate_into([]))
        chunked += [plain(rollout) for rollout in rollouts]
    assert chunked == one_by_one


def test_all_items_agents_and_generations_go_into_one_call_per_turn() -> None:
    calls: Calls = []
    collector(agents=3, generations=4).collect(items(5), generate_into(calls))
    assert [[len(own) for own in call] for call in calls] == [[20, 20, 20]]
    calls.clear()
    collector(turns=3).collect(items(5), generate_into(calls))
    assert [[len(own) for own in call] for call in calls] == [[5, 5]] * 3


def test_a_rollout_ends_after_the_turn_whose_mean_reward_exceeds_the_threshold() -> None:
    calls: Calls = []
    own = collector(turns=3, threshold=0.1)
    rollouts, _ = own.collect(items(40), generate_into(calls))
    lengths = []
    for rollout in rollouts:
        agent0, agent1 = rollout.samples
        means = [(a.reward + b.reward) / 2 for a, b in zip(agent0, agent1, strict=True)]
        assert all(mean <= 0.1 for mean in means[:-1])
        assert len(means) == 3 or means[-1] > 0.1
        assert [s.is_final_turn for s in agent0] == [False] * (len(means) - 1) + [True]
        assert rollout.reward_evaluations == len(means)
        lengths.append(len(means))
    assert {1, 2, 3} == set(lengths), "all lengths must occur, or this test shows nothing"
    still_there = [sum(length > turn for length in lengths) for turn in range(3)]
    assert [len(call[0]) for call in calls] == still_there, "ended items are not generated any more"


def test_the_return_is_the_undiscounted_sum_from_the_turn_on() -> None:
    (rollout,), _ = collector(turns=3).collect(items(1), generate_into([]))
    for own in rollout.samples:
        rewards = [s.reward for s in own]
        assert [s.expected_return for s in own] == pytest.approx([sum(rewards), sum(rewards[1:]), rewards[2]])


def test_later_prompts_come_from_the_transition() -> None:
    (rollout,), _ = collector(turns=2).collect(items(1), generate_into([]))
    first, second = rollout.samples
    assert first[1].prompt == f"item 0/1/{second[0].completion.text}"
    assert second[1].prompt == f"item 0/1/{first[0].completion.text}"


def test_every_completion_has_a_random_stream_of_its_own() -> None:
    seeds = {
        request
        for seed in range(3)
        for epoch in range(3)
        for item in range(5)
        for turn in range(3)
        for agent in range(3)
        for request in request_seeds(seed, ItemRef(item, epoch, {}), turn, agent, 3)
    }
    assert len(seeds) == 3 * 3 * 5 * 3 * 3 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_prompt_that_does_not_fit_names_item_agent_and_turn() -> None:
    def generate(prompts: Any, seeds: Any) -> Any:
        raise PromptTooLongError(position=5, tokens=900, limit=100, agent_idx=1)

    with pytest.raises(
        RolloutError, match=r"item 2, agent 1, turn 1: the prompt has 900 tokens.*truncate_prompts"
    ):
        collector(generations=2).collect(items(4), generate)


@given(
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=40),
    buffer=st.integers(1, 20),
    generations=st.integers(1, 4),
)
def test_rounds_hold_the_items_that_one_at_a_time_collection_would_put_there(
    lengths: list[int], buffer: int, generations: int
) -> None:
    """`lengths`: turns until each item ends early, of at most 3; the rule of the specification against batches."""
    expected: list[list[int]] = []
    held: list[int] = []
    for item in range(len(lengths)):
        held.append(item)
        if sum(lengths[i] * generations for i in held) >= buffer:
            expected.append(held)
            held = []
    expected += [held] if held else []  # flushed at the epoch's end

    rounds: list[list[int]] = []
    item = 0
    while item < len(lengths):
        round_items: list[int] = []
        missing = buffer
        while missing > 0 and item < len(lengths):
            stop = min(item + items_that_fit(missing, num_turns=3, num_generations=generations), len(lengths))
            assert stop > item
            round_items += range(item, stop)
            missing -= sum(lengths[i] * generations for i in range(item, stop))
            item = stop
        rounds.append(round_items)
    assert rounds == expected
