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
