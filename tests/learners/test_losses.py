"""Losses against numbers computed by hand or with plain Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learners.losses import actor_loss, clipped_value_loss, critic_loss, reference_kl, truncated_importance

FLOATS = st.floats(-5, 5)


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_actor_loss_is_minus_the_mean_weighted_logprob() -> None:
    assert actor_loss(tensor(-2.0, -3.0), tensor(0.5, -1.0)).item() == (1.0 - 3.0) / 2


def test_actor_loss_pushes_logprobs_in_the_direction_of_their_advantage() -> None:
    logprob = tensor(-2.0, -3.0).requires_grad_()
    actor_loss(logprob, tensor(0.5, -1.0)).backward()
    assert logprob.grad is not None
    assert logprob.grad.tolist() == [-0.25, 0.5]


def test_critic_loss_is_the_mean_squared_error() -> None:
    assert critic_loss(tensor(1.0, 2.0, 0.0), tensor(0.0, 4.0, 3.0)).item() == pytest.approx(14 / 3)


@pytest.mark.parametrize(
    ("value", "old", "target", "expected"),
    [
        (1.0, 0.9, 3.0, 4.0),  # inside the range: the plain error
        (
            2.0,
            0.0,
            3.0,
            (0.2 - 3.0) ** 2,
        ),  # moved towards the target too fast: the clipped error is the larger
        (-2.0, 0.0, 3.0, 25.0),  # moved away: the plain error is the larger
        (2.0, 3.0, 0.0, 2.8**2),
    ],
)
def test_value_clipping_takes_the_larger_of_both_errors(
    value: float, old: float, target: float, expected: float
) -> None:
    loss = clipped_value_loss(tensor(value), tensor(old), tensor(target), 0.2)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_a_value_that_left_the_range_towards_the_target_gets_no_gradient() -> None:
    value = tensor(2.0, 0.1).requires_grad_()
    clipped_value_loss(value, tensor(0.0, 0.0), tensor(3.0, 3.0), 0.2).backward()
    assert value.grad is not None
    assert value.grad.tolist() == pytest.approx([0.0, (0.1 - 3.0)])


@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=1, max_size=8))
def test_without_a_range_the_clipped_loss_is_the_critic_loss(rows: list[tuple[float, float, float]]) -> None:
    value, old, target = (tensor(*column) for column in zip(*rows, strict=True))
    assert clipped_value_loss(value, old, target, None).item() == critic_loss(value, target).item()
    assert clipped_value_loss(value, old, target, 0.2) >= critic_loss(value, target) - 1e-12


def test_reference_kl_sums_the_estimator_over_completion_tokens_only() -> None:
    policy = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -7.0, -7.0]], dtype=torch.float64)
    reference = torch.tensor([[-1.5, -1.0, -1.0], [-0.5, 3.0, 4.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    expected = (math.exp(-0.5) + 0.5 - 1) + (math.exp(1.0) - 1.0 - 1)
    assert reference_kl(policy, reference, mask).tolist() == pytest.approx([expected, 0.0], rel=1e-12)


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=8))
def test_reference_kl_is_never_negative(pairs: list[tuple[float, float]]) -> None:
    policy, reference = (tensor(*column)[None] for column in zip(*pairs, strict=True))
    kl = reference_kl(policy.float(), reference.float(), torch.ones_like(policy, dtype=torch.bool))
    assert kl.item() >= 0


def test_importance_is_the_ratio_of_probabilities_cut_from_above() -> None:
    learner = tensor(0.5, 0.2, 0.9).log().requires_grad_()
    weights = truncated_importance(learner, tensor(0.25, 0.4, 0.9).log(), 1.5)
    assert weights.tolist() == pytest.approx([1.5, 0.5, 1.0], rel=1e-12)
    assert not weights.requires_grad
