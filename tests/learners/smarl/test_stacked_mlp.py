"""Stacked networks against `torch.nn.Sequential`, one agent at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parameters_to_vector

from learners.smarl.stacked_mlp import MLPShape

SIZES = st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple)


def sequential(sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for into, out in pairwise(sizes):
        layers += [nn.Linear(into, out, dtype=torch.float64), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def stack(modules: list[nn.Sequential]) -> torch.Tensor:
    return torch.stack([parameters_to_vector(module.parameters()) for module in modules]).detach()


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(1, 4), st.integers(1, 5), st.integers(0, 999))
def test_outputs_and_gradients_are_those_of_a_sequential_of_each_agent(
    sizes: tuple[int, ...], agents: int, batch: int, seed: int
) -> None:
    torch.manual_seed(seed)
    modules = [sequential(sizes) for _ in range(agents)]
    inputs = torch.randn(agents, batch, sizes[0], dtype=torch.float64)
    wanted = torch.randn(agents, batch, sizes[-1], dtype=torch.float64)
    rows = stack(modules).requires_grad_()
    shape = MLPShape(sizes)
    assert shape.num_parameters == rows.shape[1]
    outputs = shape.forward(rows, inputs)
    (outputs * wanted).sum().backward()
    for agent, module in enumerate(modules):
        alone = module(inputs[agent])
        (alone * wanted[agent]).sum().backward()
        torch.testing.assert_close(outputs[agent], alone, rtol=1e-12, atol=1e-12)
        gradient = torch.cat([parameter.grad.ravel() for parameter in module.parameters()])
        torch.testing.assert_close(rows.grad[agent], gradient, rtol=1e-11, atol=1e-11)


def test_a_row_holds_weight_then_bias_of_each_layer() -> None:
    shape = MLPShape((2, 1, 1))
    layers = [(np.array([[1.0, 2.0]]), np.array([3.0])), (np.array([[-4.0]]), np.array([5.0]))]
    row = shape.flatten(layers)
    assert row.tolist() == [1, 2, 3, -4, 5]
    # relu(1 * 1 + 2 * 10 + 3) = 24, -4 * 24 + 5 = -91; relu(-1 - 20 + 3) = 0, 5
    inputs = torch.tensor([[[1.0, 10.0], [-1.0, -10.0]]], dtype=torch.float64)
    assert shape.forward(torch.from_numpy(row)[None], inputs).tolist() == [[[-91.0], [5.0]]]


def test_splitting_gives_back_what_was_flattened_and_moves_with_the_rows() -> None:
    rng, shape = np.random.default_rng(0), MLPShape((3, 4, 2))
    layers = [(rng.random((4, 3)), rng.random(4)), (rng.random((2, 4)), rng.random(2))]
    rows = torch.from_numpy(np.stack([shape.flatten(layers), shape.flatten(layers) + 1]))
    for (weights, biases), (weight, bias) in zip(shape.split(rows), layers, strict=True):
        np.testing.assert_array_equal(weights[0], weight)
        np.testing.assert_array_equal(biases[1], bias + 1)
    rows.zero_()
    assert all(not weights.any() and not biases.any() for weights, biases in shape.split(rows))


@pytest.mark.parametrize("sizes", [(1, 2000), (100, 50, 60)])
def test_initial_rows_are_uniform_within_one_over_the_root_of_the_inputs(sizes: tuple[int, ...]) -> None:
    shape = MLPShape(sizes)
    row = shape.initial_row(np.random.default_rng(5))
    assert row.shape == (shape.num_parameters,)
    for weights, biases in shape.split(torch.from_numpy(row)[None]):
        bound = weights.shape[2] ** -0.5
        numbers = np.concatenate([weights.numpy().ravel(), biases.numpy().ravel()])
        assert np.abs(numbers).max() <= bound
        # A uniform number has variance bound^2 / 3 and mean 0; four standard errors either way.
        error = 4 * bound / np.sqrt(len(numbers))
        assert abs(numbers.mean()) < error
        assert numbers.var() == pytest.approx(bound**2 / 3, abs=error * bound)
    np.testing.assert_array_equal(row, shape.initial_row(np.random.default_rng(5)))
    assert not np.array_equal(row, shape.initial_row(np.random.default_rng(6)))
