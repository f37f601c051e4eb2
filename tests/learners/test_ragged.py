"""Ragged arrays: what goes in comes out, as views, here and after a journey."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.ragged import Ragged
from learners.samples import CompletionBatch

ROWS = st.lists(st.lists(st.integers(-5, 5), max_size=6), max_size=8)


@given(ROWS)
def test_a_ragged_is_the_sequence_of_its_arrays(rows: list[list[int]]) -> None:
    ragged = Ragged.of([np.array(row, np.int64) for row in rows], np.int32)
    for each in (ragged, pickle.loads(pickle.dumps(ragged, protocol=5))):
        assert len(each) == len(rows)
        assert [row.tolist() for row in each] == rows
        assert [each[i].tolist() for i in range(len(rows))] == rows
        assert [each[i].tolist() for i in range(-len(rows), 0)] == rows
        assert [row.tolist() for row in each[1:4]] == rows[1:4]
        assert all(row.dtype == np.int32 for row in each)
        with pytest.raises(IndexError):
            each[len(rows)]


def test_arrays_are_views_and_travel_as_two_buffers() -> None:
    ragged = Ragged.of([np.arange(n) for n in range(100)], np.float32)
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(ragged, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 2
    assert np.shares_memory(ragged[50], ragged[99].base)


def test_a_batch_of_completions_unpacks_in_order() -> None:
    tokens = [np.array([7, 8], np.int32), np.array([9], np.int32)]
    prompts = [np.array([1], np.int32), np.array([2, 3, 4], np.int32)]
    logprobs = [np.array([-0.5, -1.0], np.float32), np.array([-2.0], np.float32)]
    first, second = CompletionBatch(
        Ragged.of(prompts, np.int32),
        Ragged.of(tokens, np.int32),
        Ragged.of(logprobs, np.float32),
        ["a", "b"],
        ["stop", "length"],
        [False, True],
        4,
    ).unpack()
    assert (first.text, first.finish_reason, first.prompt_truncated) == ("a", "stop", False)
    assert (second.text, second.finish_reason, second.prompt_truncated) == ("b", "length", True)
    assert [c.weight_version for c in (first, second)] == [4, 4]
    for completion, prompt, ids, scores in zip((first, second), prompts, tokens, logprobs, strict=True):
        assert completion.prompt_ids.tolist() == prompt.tolist()
        assert completion.token_ids.tolist() == ids.tolist()
        assert completion.logprobs.tolist() == scores.tolist()
