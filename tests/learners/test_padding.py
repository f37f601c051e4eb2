"""Padding is undone exactly, and micro-batches stay within their budget."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learners.padding import deal_micro_batches, lengths_of, pad, pad_policy, pad_texts, plan_micro_batches
from learners.samples import IntArray

TOKEN = st.integers(0, 99)
PROMPT = st.lists(TOKEN, min_size=1, max_size=9)
COMPLETION = st.lists(TOKEN, max_size=9)


def arrays(sequences: list[list[int]]) -> list[IntArray]:
    return [np.array(sequence, dtype=np.int32) for sequence in sequences]


@given(st.lists(st.tuples(PROMPT, COMPLETION), min_size=1, max_size=8))
def test_padded_prompts_and_completions_are_recovered_by_the_masks(
    pairs: list[tuple[list[int], list[int]]],
) -> None:
    prompts, completions = [p for p, _ in pairs], [c for _, c in pairs]
    inputs = pad_policy(arrays(prompts), arrays(completions))
    width = inputs.prompt_width
    assert width == max(map(len, prompts))
    for row, (prompt, completion) in enumerate(pairs):
        kept = inputs.attention_mask[row].bool()
        assert inputs.input_ids[row][kept].tolist() == prompt + completion
        assert inputs.position_ids[row][kept].tolist() == list(range(len(prompt) + len(completion)))
        assert inputs.input_ids[row, width:].tolist() == inputs.completion_ids[row].tolist()
        assert inputs.completion_ids[row][inputs.completion_mask[row]].tolist() == completion
        assert inputs.input_ids[row, :width].tolist()[width - len(prompt) :] == prompt
        text = prompt + completion
        columns = kept.nonzero().flatten().tolist()
        assert columns.index(int(inputs.value_columns("v")[row])) == len(prompt) - 1
        assert columns.index(int(inputs.value_columns("q")[row])) == len(text) - 1
    predicting = inputs.logit_columns()
    assert (predicting + 1).tolist() == list(range(width, inputs.input_ids.shape[1]))


@given(st.lists(PROMPT, min_size=1, max_size=8))
def test_padded_texts_are_recovered_and_end_where_they_say(texts: list[list[int]]) -> None:
    inputs = pad_texts(arrays(texts))
    for row, text in enumerate(texts):
        assert inputs.input_ids[row][inputs.attention_mask[row].bool()].tolist() == text
        assert inputs.input_ids[row, inputs.last_column[row]].item() == text[-1]
        assert inputs.position_ids[row, inputs.last_column[row]].item() == len(text) - 1


def test_all_completions_empty_still_gives_a_column() -> None:
    inputs = pad_policy(arrays([[5, 6], [7]]), arrays([[], []]))
    assert inputs.completion_mask.shape == (2, 1)
    assert not inputs.completion_mask.any()
    assert inputs.value_columns("q").tolist() == inputs.value_columns("v").tolist() == [1, 1]


def test_an_empty_prompt_or_text_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt has no token"):
        pad_policy(arrays([[1], []]), arrays([[1], [1]]))
    with pytest.raises(ValueError, match="text has no token"):
        pad_texts(arrays([[]]))


def test_padding_pads_on_the_named_side() -> None:
    left, left_mask = pad(arrays([[1, 2, 3], [4]]), side="left")
    right, right_mask = pad(arrays([[1, 2, 3], [4]]), side="right")
    assert left.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert right.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert left_mask.tolist() == [[True] * 3, [False, False, True]]
    assert right_mask.tolist() == [[True] * 3, [True, False, False]]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), max_size=40),
    st.integers(1, 300),
)
def test_micro_batches_partition_the_rows_within_the_budget(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    table = np.array(lengths, dtype=np.int64).reshape(-1, 2)
    plan = plan_micro_batches(table, budget)
    assert sorted(int(i) for rows in plan for i in rows) == list(range(len(lengths)))
    padded = [len(rows) * int(table[rows].max(axis=0).sum()) for rows in plan]
    assert all(size <= budget or len(rows) == 1 for size, rows in zip(padded, plan, strict=True))
    # No micro-batch could have taken the first row of the next one as well: the plan wastes no pass.
    for rows, following in itertools.pairwise(plan):
        joined = table[[*rows, following[0]]]
        assert len(joined) * int(joined.max(axis=0).sum()) > budget


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=30),
    st.integers(1, 200),
    st.integers(1, 4),
)
def test_dealt_micro_batches_are_equally_many_and_count_every_row_once(
    lengths: list[tuple[int, int]], budget: int, size: int
) -> None:
    table = np.array(lengths, dtype=np.int64)
    hands = [deal_micro_batches(table, budget, rank, size) for rank in range(size)]
    assert len({len(hand) for hand in hands}) == 1
    counted = [int(row) for hand in hands for part in hand if part.counts for row in part.rows]
    assert sorted(counted) == list(range(len(lengths)))
    assert all(len(part.rows) for hand in hands for part in hand)
    for part in itertools.chain.from_iterable(hands):
        assert len(part.rows) == 1 or len(part.rows) * table[part.rows].max(axis=0).sum() <= budget
    alone = [part.rows.tolist() for part in deal_micro_batches(table, budget, 0, 1)]
    assert alone == [rows.tolist() for rows in plan_micro_batches(table, budget)]


def test_a_row_over_the_budget_is_alone_and_not_left_out() -> None:
    plan = plan_micro_batches(np.array([[3], [100], [4]]), 8)
    assert [rows.tolist() for rows in plan] == [[1], [2, 0]]


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        plan_micro_batches(np.array([[3]]), 0)


def test_lengths_and_devices() -> None:
    assert lengths_of(arrays([[1, 2], [], [3]])).tolist() == [2, 0, 1]
    moved = pad_texts(arrays([[1, 2]])).to(torch.device("cpu"))
    assert moved.input_ids.tolist() == [[1, 2]]
