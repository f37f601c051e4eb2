"""Micro-batch means add up to mini-batch means, and those to means over an update."""

from __future__ import annotations

import pytest
import torch

from learners.minibatch_means import MiniBatchMeans


def test_means_are_weighted_by_the_samples_they_stand_for() -> None:
    means = MiniBatchMeans(torch.device("cpu"))
    means.add(2 / 3, loss=torch.tensor(3.0, requires_grad=True))
    means.add(1 / 3, loss=9.0)
    assert means.current("loss").item() == pytest.approx(5.0)
    means.close(3)
    means.add(1.0, loss=1.0)
    means.close(1)
    assert means.per_minibatch("loss") == pytest.approx([5.0, 1.0])
    assert means.mean("loss") == pytest.approx((3 * 5.0 + 1.0) / 4)
    assert means.mean("loss", per_sample=False) == pytest.approx(3.0)


def test_a_name_never_added_has_no_minibatches() -> None:
    means = MiniBatchMeans(torch.device("cpu"))
    assert means.per_minibatch("loss") == []
    assert means.mean("loss") == 0.0


def test_other_ranks_parts_of_a_mini_batch_are_taken_in_before_it_is_closed() -> None:
    means = MiniBatchMeans(torch.device("cpu"))
    means.add(0.5, loss=3.0, value=1.0)
    means.reduce(lambda own: own + torch.tensor([0.5, 2.0], dtype=torch.float64))
    assert means.current("loss") == 2.0
    means.close(4)
    assert (means.per_minibatch("loss"), means.per_minibatch("value")) == ([2.0], [2.5])
