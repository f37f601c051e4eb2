"""Replay buffers against plain lists, and the states that a resumed run continues from."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learners.smarl.random_streams import Purpose, stream
from learners.smarl.replay import Replay, Transitions


def joint(start: int, rows: int, agents: int) -> Transitions:
    """Transitions whose every number names its row and agent."""
    marks = 1000.0 * np.arange(agents) + np.arange(start, start + rows)[:, None]
    return Transitions(
        np.stack([marks, marks], -1),
        marks[..., None] + 0.25,
        marks + 0.5,
        np.stack([marks, marks], -1) + 1,
        np.arange(start, start + rows) % 3 == 0,
    )


def replay(agents: int, *, capacity: int, shared: bool = False) -> Replay:
    return Replay(agents, 2, 1, capacity=capacity, shared=shared, dtype=torch.float64)


def held(memory: Replay, index: int) -> list[float]:
    return memory.state(index)["rewards"].tolist()


@settings(max_examples=60)
@given(st.lists(st.integers(1, 7), max_size=8), st.integers(1, 12))
def test_every_agent_keeps_its_own_newest_rows(additions: list[int], capacity: int) -> None:
    memory, kept = replay(2, capacity=capacity), [deque[float](maxlen=capacity) for _ in range(2)]
    start = 0
    for rows in additions:
        memory.add(joint(start, rows, 3), agents=[2, 0])
        for own, agent in zip(kept, [2, 0], strict=True):
            own.extend(1000.0 * agent + row + 0.5 for row in range(start, start + rows))
        start += rows
    assert [held(memory, k) for k in range(2)] == [list(own) for own in kept]
    assert memory.sizes(2) == [len(own) for own in kept]


def test_a_shared_buffer_takes_all_agents_parts_and_serves_everyone() -> None:
    memory = replay(2, capacity=100, shared=True)
    memory.add(joint(0, 4, 3), agents=[0, 1])
    assert sorted(held(memory, 0)) == sorted(1000.0 * a + r + 0.5 for a in range(3) for r in range(4))
    assert memory.sizes(2) == [12, 12]
    batch = memory.sample(200, range(2), [stream(0, Purpose.REPLAY, agent) for agent in range(2)])
    assert {int(mark) // 1000 for mark in batch.rewards[1].tolist()} == {0, 1, 2}


@pytest.mark.parametrize("shared", [False, True])
def test_a_minibatch_holds_whole_rows_of_the_right_agent(shared: bool) -> None:
    memory = replay(2, capacity=50, shared=shared)
    memory.add(joint(0, 30, 2), agents=[0, 1])
    batch = memory.sample(64, range(2), [stream(0, Purpose.REPLAY, agent) for agent in range(2)])
    marks = batch.rewards - 0.5
    torch.testing.assert_close(batch.observations, torch.stack([marks, marks], -1))
    torch.testing.assert_close(batch.actions.squeeze(-1), marks + 0.25)
    torch.testing.assert_close(batch.next_observations, torch.stack([marks, marks], -1) + 1)
    assert torch.equal(batch.terminated, (marks % 1000).long() % 3 == 0)
    if not shared:
        assert [set((own // 1000).tolist()) for own in marks] == [{0.0}, {1.0}]


def test_sampling_is_uniform() -> None:
    memory = replay(1, capacity=10)
    memory.add(joint(0, 25, 1), agents=[0])
    batch = memory.sample(20_000, [0], [stream(0, Purpose.REPLAY)])
    values, counts = np.unique(batch.rewards.numpy(), return_counts=True)
    assert values.tolist() == [row + 0.5 for row in range(15, 25)]
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(2000 * 0.9)


def test_what_an_agent_draws_does_not_depend_on_who_is_beside_it() -> None:
    both, alone = replay(2, capacity=20), replay(1, capacity=20)
    both.add(joint(0, 20, 2), agents=[0, 1])
    alone.add(joint(0, 20, 2), agents=[1])
    drawn = both.sample(8, range(2), [stream(3, Purpose.REPLAY, agent, 5) for agent in range(2)])
    own = alone.sample(8, [0], [stream(3, Purpose.REPLAY, 1, 5)])
    assert torch.equal(drawn.rewards[1], own.rewards[0])


@pytest.mark.parametrize("rows", [3, 10, 27])
def test_a_restored_buffer_draws_the_same_rows_and_goes_on_alike(rows: int) -> None:
    memory, restored = replay(1, capacity=10), replay(1, capacity=10)
    memory.add(joint(0, rows, 1), agents=[0])
    restored.load_state(0, memory.state(0))
    for _ in range(2):
        draws: list[Any] = [
            m.sample(32, [0], [stream(1, Purpose.REPLAY)]).rewards for m in (memory, restored)
        ]
        assert torch.equal(*draws)
        for each in (memory, restored):
            each.add(joint(rows, 4, 1), agents=[0])


def test_agents_leave_and_join() -> None:
    memory = replay(3, capacity=10)
    memory.add(joint(0, 2, 3), agents=[0, 1, 2])
    memory.keep([0, 2])
    memory.join(1)
    assert [held(memory, k) for k in range(3)] == [[0.5, 1.5], [2000.5, 2001.5], []]


def test_a_state_larger_than_the_buffer_is_refused() -> None:
    memory = replay(1, capacity=10)
    memory.add(joint(0, 8, 1), agents=[0])
    with pytest.raises(ValueError, match="8 saved transitions do not fit a replay_capacity of 4"):
        replay(1, capacity=4).load_state(0, memory.state(0))
