"""Common actions against formulas worked out by hand, and exploration against the frequencies it promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from teams import CONTINUOUS, DISCRETE, SPACES, space_name

from learners.smarl.common_action import CommonSpace, Exploration, exploit, explore, one_hot, random_actions

DRAWS = 40_000
LOGITS = np.array([0.5, -1.0, 1.5])


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def assert_frequencies(rows: np.ndarray, expected: np.ndarray) -> None:
    """Of one-hot rows [n, size]: within four standard errors."""
    assert set(np.unique(rows)) <= {0.0, 1.0}
    np.testing.assert_array_equal(rows.sum(1), 1)
    error = 4 * np.sqrt(expected * (1 - expected) / len(rows)) + 1e-12
    assert (np.abs(rows.mean(0) - expected) < error).all(), (rows.mean(0), expected)


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        ((0.0,), (1.0, 1.0), "low has 1, high 2"),
        ((), (), "2 action dimensions"),
        ((0.0, 2.0), (1.0, 2.0), "dimension 1 ranges from 2.0 to 2.0"),
        ((-math.inf, 0.0), (1.0, 1.0), "dimension 0 ranges from -inf"),
        ((0.0, 0.0), (1.0, math.nan), "dimension 1 ranges from 0.0 to nan"),
    ],
)
def test_a_continuous_space_without_finite_ranges_is_refused(
    low: tuple[float, ...], high: tuple[float, ...], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        CommonSpace(False, 2, low, high)


def test_continuous_actions_are_tanh_scaled_to_the_bounds() -> None:
    outputs = torch.tensor([[0.0, 0.0], [50.0, -50.0], [0.3, -0.7]], dtype=torch.float64, requires_grad=True)
    action = CONTINUOUS.action(outputs)  # bounds -1..1 and 0..4
    assert action[0].tolist() == [0.0, 2.0]
    assert action[1].tolist() == pytest.approx([1.0, 0.0])
    assert action[2].tolist() == pytest.approx([math.tanh(0.3), 2 + 2 * math.tanh(-0.7)])
    action.sum().backward()
    assert outputs.grad[2].tolist() == pytest.approx([1 - math.tanh(0.3) ** 2, 2 * (1 - math.tanh(0.7) ** 2)])
    assert torch.equal(CONTINUOUS.relaxed(outputs, None, 1.0), action)


def test_discrete_actions_are_the_one_hot_row_of_the_largest_output() -> None:
    outputs = torch.tensor([[[0.1, 0.3, 0.2], [-1.0, -3.0, -2.0]]], dtype=torch.float64)
    assert DISCRETE.action(outputs).tolist() == [[[0, 1, 0], [1, 0, 0]]]
    assert DISCRETE.action(outputs).dtype == torch.float64


@settings(max_examples=50)
@given(
    arrays(np.float64, 3, elements=st.floats(-3, 3)),
    arrays(np.float64, 3, elements=st.floats(-3, 3)),
    arrays(np.float64, 3, elements=st.floats(-3, 3)),
    st.floats(0.2, 5),
)
def test_straight_through_is_one_hot_forward_and_softmax_backward(
    logits: np.ndarray, noise: np.ndarray, weights: np.ndarray, temperature: float
) -> None:
    second, first = np.sort(logits + noise)[1:]
    assume(first - second > 1e-6)  # a tie may fall either way
    outputs = torch.tensor(logits, requires_grad=True)
    action = DISCRETE.relaxed(outputs, torch.tensor(noise), temperature)
    forward = action.detach().numpy()
    assert forward.argmax() == ((logits + noise) / temperature).argmax()
    np.testing.assert_allclose(np.sort(forward), [0, 0, 1], atol=1e-12)
    (action * torch.tensor(weights)).sum().backward()
    # d(w . softmax(z / T)) / dz_j = s_j (w_j - w . s) / T
    soft = softmax((logits + noise) / temperature)
    np.testing.assert_allclose(outputs.grad, soft * (weights - weights @ soft) / temperature, atol=1e-12)


def test_relaxed_actions_are_drawn_from_the_softmax_whatever_the_relaxation() -> None:
    noise = torch.from_numpy(np.random.default_rng(0).gumbel(size=(DRAWS, 3)))
    rows = DISCRETE.relaxed(torch.from_numpy(LOGITS).expand(DRAWS, 3), noise, 0.3).round().numpy()
    assert_frequencies(rows, softmax(LOGITS))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_discrete_exploration_samples_the_softmax_at_its_temperature(temperature: float) -> None:
    rows = explore(
        DISCRETE, np.tile(LOGITS, (DRAWS, 1)), Exploration(0, 0, temperature), np.random.default_rng(1)
    )
    assert_frequencies(rows, softmax(LOGITS / temperature))


def test_epsilon_is_the_share_of_uniformly_random_choices() -> None:
    certain = np.tile([0.0, 1e6, 0.0], (DRAWS, 1))
    rows = explore(DISCRETE, certain, Exploration(0, 0.3, 1.0), np.random.default_rng(2))
    assert_frequencies(rows, np.array([0.1, 0.8, 0.1]))
    rows = explore(DISCRETE, certain, Exploration(0, 1.0, 1.0), np.random.default_rng(3))
    assert_frequencies(rows, np.full(3, 1 / 3))
    rows = explore(DISCRETE, certain, Exploration(0, 0.0, 1.0), np.random.default_rng(4))
    assert_frequencies(rows, np.array([0.0, 1.0, 0.0]))


@settings(max_examples=50)
@given(
    arrays(np.float32, (4, 2), elements=st.floats(-1e4, 1e4, width=32)),
    st.floats(0, 10),
    st.integers(0, 9),
)
def test_continuous_exploration_stays_within_the_bounds(outputs: np.ndarray, noise: float, seed: int) -> None:
    acted = explore(CONTINUOUS, outputs, Exploration(noise, 0, 1.0), np.random.default_rng(seed))
    assert acted.dtype == np.float32
    assert (acted >= np.float32(CONTINUOUS.low)).all()
    assert (acted <= np.float32(CONTINUOUS.high)).all()


def test_continuous_noise_is_gaussian_in_halves_of_the_range() -> None:
    outputs = np.zeros((DRAWS, 2))
    acted = explore(CONTINUOUS, outputs, Exploration(0.1, 0, 1.0), np.random.default_rng(5))
    np.testing.assert_allclose(acted.mean(0), [0, 2], atol=0.004)
    np.testing.assert_allclose(acted.std(0), [0.1, 0.2], rtol=0.02)
    assert abs(np.corrcoef(acted.T)[0, 1]) < 0.02  # each dimension has its own
    still = explore(CONTINUOUS, outputs + 0.4, Exploration(0, 0, 1.0), np.random.default_rng(5))
    np.testing.assert_array_equal(still, exploit(CONTINUOUS, outputs + 0.4))


@pytest.mark.parametrize("space", SPACES, ids=space_name)
def test_exploiting_is_the_action_of_the_critics_eyes(space: CommonSpace) -> None:
    outputs = np.random.default_rng(6).standard_normal((3, 4, space.size)).astype(np.float32)
    acted = exploit(space, outputs)
    assert acted.dtype == np.float32
    np.testing.assert_array_equal(acted, space.action(torch.from_numpy(outputs)).numpy())


def test_random_actions_are_uniform() -> None:
    assert_frequencies(random_actions(DISCRETE, (DRAWS,), np.random.default_rng(7)), np.full(3, 1 / 3))
    uniform = random_actions(CONTINUOUS, (DRAWS,), np.random.default_rng(8))
    assert uniform.shape == (DRAWS, 2)
    assert (uniform >= CONTINUOUS.low).all()
    assert (uniform <= CONTINUOUS.high).all()
    np.testing.assert_allclose(uniform.mean(0), [0, 2], atol=0.03)
    np.testing.assert_allclose(uniform.var(0), [4 / 12, 16 / 12], rtol=0.05)


def test_one_hot_rows_have_the_shape_of_the_choices() -> None:
    assert one_hot(np.array([[2, 0], [1, 1]]), 3).tolist() == [
        [[0, 0, 1], [1, 0, 0]],
        [[0, 1, 0], [0, 1, 0]],
    ]
