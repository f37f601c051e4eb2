"""The target network's memory against dictionaries of everything that was ever added."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learners.smarl.memory import MemorySet, SequenceMemory

SIZE = 2
Row = tuple[tuple[float, ...], int, float]
"""All numbers of an observation, a mark that names the row, and its reward."""


def arrays(rows: list[Row], agents: int) -> dict[str, Any]:
    """What `add` takes; a row's mark is written into its mask and targets in base 2."""
    observations = np.array([row[0] for row in rows], np.float32).reshape(-1, agents, SIZE)
    masks = np.zeros((len(rows), agents, agents), bool)
    targets = np.zeros((len(rows), agents), np.int64)
    for index, (_, mark, _) in enumerate(rows):
        targets[index] = [mark >> bit & 1 for bit in range(agents)]
        masks[index, np.arange(agents), targets[index]] = True
    return {
        "observations": observations,
        "targets": targets,
        "rewards": [row[2] for row in rows],
        "mask": masks,
    }


def rows_of(selected: MemorySet) -> list[Row]:
    agents = selected.targets.shape[1]
    assert np.take_along_axis(selected.masks, selected.targets[..., None], -1).all()
    assert (selected.masks.sum(-1) == 1).all()
    marks = (selected.targets << np.arange(agents)).sum(-1)
    observations = selected.observations.reshape(len(selected), -1).tolist()
    return [
        (tuple(o), int(m), float(r)) for o, m, r in zip(observations, marks, selected.rewards, strict=True)
    ]


def best(rows: list[Row], resolution: float | None) -> list[Row]:
    """The dictionary: an entry is replaced only by a larger reward, and is as old as the row that it holds."""
    kept: dict[Any, int] = {}
    for index, (observation, _, reward) in enumerate(rows):
        key = observation if resolution is None else tuple(round(x / resolution) for x in observation)
        if key not in kept or reward > rows[kept[key]][2]:
            kept[key] = index
    return [rows[index] for index in sorted(kept.values())]


AGENTS = 6  # marks of up to 63 rows
values = st.sampled_from([0.0, -0.0, 0.1, 0.25, 1.0, 1.5, -2.0])
observation = st.builds(lambda a, b: (a, b) + (0.0,) * (AGENTS * SIZE - 2), values, values).map(
    lambda o: tuple(float(np.float32(x)) for x in o)
)
additions = st.lists(
    st.lists(st.tuples(observation, st.sampled_from([-1.0, 0.0, 0.5, 0.5000001, 3.0])), max_size=9),
    max_size=6,
)


def marked(chunks: list[list[tuple[tuple[float, ...], float]]]) -> list[list[Row]]:
    mark = iter(range(64))
    return [[(o, next(mark), reward) for o, reward in chunk] for chunk in chunks]


@settings(max_examples=150, deadline=None)
@given(additions, st.sampled_from([None, 0.4]), st.sets(st.integers(0, 5)))
def test_the_best_of_each_observation_is_kept(
    chunks: list[list[tuple[tuple[float, ...], float]]], resolution: float | None, selects: set[int]
) -> None:
    memory, everything = SequenceMemory(1000, resolution), list[Row]()
    for index, chunk in enumerate(marked(chunks)):
        memory.add(**arrays(chunk, AGENTS))
        everything += chunk
        if index in selects:  # selecting in between loses nothing
            memory.select()
    expected = best(everything, resolution)
    assert memory.stats()["memory_distinct"] == len(expected)
    assert memory.stats()["memory_dropped"] == 0
    selected = memory.select()
    assert (rows_of(selected[AGENTS]) if selected else []) == expected
    assert memory.stats() == {
        "memory_size": len(expected),
        "memory_distinct": len(expected),
        "memory_dropped": 0,
    }


@settings(max_examples=150, deadline=None)
@given(additions, st.integers(1, 12), st.sets(st.integers(0, 5)))
def test_the_bound_drops_the_oldest_of_the_best(
    chunks: list[list[tuple[tuple[float, ...], float]]], capacity: int, selects: set[int]
) -> None:
    memory, held, dropped = SequenceMemory(capacity), list[Row](), 0
    for index, chunk in enumerate(marked(chunks)):
        memory.add(**arrays(chunk, AGENTS))
        held += chunk
        if index in selects or (chunk and len(held) > capacity * 5 // 4):
            distinct = best(held, None)
            held = distinct[-capacity:]
            dropped += len(distinct) - len(held)
        if index in selects:
            selected = memory.select()
            assert (rows_of(selected[AGENTS]) if selected else []) == held
        assert memory.stats()["memory_size"] == len(held)
        assert memory.stats()["memory_dropped"] == dropped


def plain(rewards: list[float], first: float = 0.0, agents: int = 2) -> dict[str, Any]:
    """Rows with observations first, first + 1, ... and alternating targets."""
    count = len(rewards)
    observations = np.zeros((count, agents, SIZE), np.float32)
    observations[:, 0, 0] = first + np.arange(count)
    targets = np.tile((np.arange(agents) + 1) % agents, (count, 1))
    mask = np.tile(~np.eye(agents, dtype=bool), (count, 1, 1))
    return {"observations": observations, "targets": targets, "rewards": rewards, "mask": mask}


def test_the_largest_reward_wins_and_the_earliest_of_equals() -> None:
    memory = SequenceMemory(10)
    chunk = plain([1.0, 5.0, 5.0, 2.0])
    chunk["observations"][:] = 7
    chunk["mask"][:] = True
    chunk["targets"] = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    memory.add(**chunk)
    selected = memory.select()[2]
    assert selected.targets.tolist() == [[0, 1]]
    assert selected.rewards.tolist() == [5.0]
    assert memory.stats() == {"memory_size": 1, "memory_distinct": 1, "memory_dropped": 0}


def test_a_full_memory_keeps_the_newest_observations() -> None:
    memory = SequenceMemory(4)
    memory.add(**plain([0.0] * 12))
    assert memory.select()[2].observations[:, 0, 0].tolist() == [8, 9, 10, 11]
    assert memory.stats() == {"memory_size": 4, "memory_distinct": 4, "memory_dropped": 8}


def test_repetitions_are_not_dropped_observations() -> None:
    memory = SequenceMemory(3)
    for reward in range(20):
        memory.add(**plain([float(reward)] * 3))
    assert memory.select()[2].rewards.tolist() == [19.0] * 3
    assert memory.stats()["memory_dropped"] == 0


def test_quantised_observations_are_equal_within_a_cell_and_kept_as_they_were() -> None:
    memory, exact = SequenceMemory(10, 0.5), SequenceMemory(10)
    chunk = plain([1.0, 2.0, 0.0])
    chunk["observations"][:, 0, 0] = [0.9, 1.1, 1.4]
    for each in (memory, exact):
        each.add(**chunk)
    assert memory.select()[2].observations[:, 0, 0].tolist() == np.float32([1.1, 1.4]).tolist()
    assert len(exact.select()[2]) == 3


def test_each_number_of_agents_has_its_own_memory() -> None:
    memory = SequenceMemory(3)
    memory.add(**plain([1.0] * 3, agents=4))
    memory.add(**plain([1.0] * 3, agents=2))
    memory.add(**plain([1.0] * 3, first=10, agents=2))
    selected = memory.select()
    assert list(selected) == [2, 4]
    assert selected[2].observations[:, 0, 0].tolist() == [10, 11, 12]
    assert selected[4].observations.shape == (3, 4, SIZE)
    assert memory.stats() == {"memory_size": 6, "memory_distinct": 6, "memory_dropped": 3}


def test_what_was_selected_does_not_change_with_later_additions() -> None:
    memory = SequenceMemory(3)
    memory.add(**plain([1.0] * 3))
    selected = memory.select()[2]
    memory.add(**plain([9.0] * 3, first=50))
    memory.select()
    assert selected.observations[:, 0, 0].tolist() == [0, 1, 2]
    assert selected.rewards.tolist() == [1.0] * 3


def test_a_restored_memory_goes_on_alike() -> None:
    memory, restored = SequenceMemory(4), SequenceMemory(4)
    memory.add(**plain([1.0] * 7))
    memory.add(**plain([1.0, 2.0], agents=3))
    memory.add(**plain([3.0], first=5))  # a fifth row, a repetition, waits for the next compaction
    restored.add(**plain([0.0], agents=5))
    state = memory.state()
    assert all(isinstance(array, np.ndarray) for array in state.values())
    restored.load_state(state)
    assert restored.stats() == memory.stats()
    for each in (memory, restored):
        each.add(**plain([1.0] * 2, first=20))
    first, second = memory.select(), restored.select()
    assert list(first) == list(second) == [2, 3]
    for agents in first:
        assert rows_of_plain(first[agents]) == rows_of_plain(second[agents])
    assert restored.stats() == memory.stats()
    assert state["2.rewards"].tolist() == [1.0] * 4 + [
        3.0
    ]  # a copy: additions and selections do not reach it


def rows_of_plain(selected: MemorySet) -> list[Any]:
    columns = (selected.observations, selected.targets, selected.masks, selected.rewards)
    return [column.tolist() for column in columns]


def test_a_state_larger_than_the_memory_is_refused() -> None:
    memory = SequenceMemory(10)
    memory.add(**plain([0.0] * 8))
    with pytest.raises(ValueError, match="8 saved sequences of 2 agents do not fit a memory_capacity of 4"):
        SequenceMemory(4).load_state(memory.state())


def test_bad_rows_are_named_and_not_remembered() -> None:
    memory = SequenceMemory(10)
    memory.add(**plain([1.0]))
    faults: list[tuple[str, Any, Any, str]] = [
        ("rewards", 1, math.nan, "step 1, all agents: the reward R.seq is nan"),
        ("rewards", 2, -math.inf, "step 2, all agents: the reward R.seq is -inf"),
        ("observations", (2, 1, 0), math.nan, r"step 2, agent 1: the universal observation \[nan, 0.0\]"),
        ("observations", (0, 0, 1), math.inf, "step 0, agent 0: the universal observation"),
        ("targets", (1, 1), 1, "step 1, agent 1: target 1 is not one that the mask allows"),
        ("targets", (1, 0), 2, "step 1, agent 0: target 2 is not one"),
        ("targets", (2, 0), -1, "step 2, agent 0: target -1 is not one"),
        ("targets", (0, 1), 2, "step 0, agent 1: target 2 is not one"),
    ]
    for column, where, value, message in faults:
        chunk = plain([0.0, 0.0, 0.0], first=5)
        chunk[column][where] = value
        with pytest.raises(ValueError, match=message):
            memory.add(**chunk)
    with pytest.raises(ValueError, match=r"rewards \(2,\).* must be"):
        memory.add(**{**plain([0.0] * 3), "rewards": [0.0] * 2})
    with pytest.raises(ValueError, match="universal_size is one for all"):
        memory.add(np.zeros((1, 3, 5)), [[1, 0, 0]], [0.0], ~np.eye(3, dtype=bool)[None])
    assert memory.stats()["memory_size"] == 1


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="memory_capacity 0 must be at least 1"):
        SequenceMemory(0)
    with pytest.raises(ValueError, match=r"memory_resolution 0\.0 must be positive"):
        SequenceMemory(1, 0.0)


def test_an_empty_memory_selects_nothing() -> None:
    memory = SequenceMemory(5)
    assert memory.select() == {}
    memory.add(**plain([]))
    assert memory.select() == {}
    restored = SequenceMemory(5)
    restored.load_state(memory.state())
    assert restored.select() == {}
