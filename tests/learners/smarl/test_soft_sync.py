"""Soft updates against what follows from their formula, and against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from learners.smarl.soft_sync import soft_update, sync_with_centre

NUMBERS = st.floats(-1e3, 1e3)
TAUS = st.floats(0, 1)


@st.composite
def teams(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A centre [P] and agents [N, P]."""
    agents, size = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return (
        draw(arrays(np.float64, size, elements=NUMBERS)),
        draw(arrays(np.float64, (agents, size), elements=NUMBERS)),
    )


def synced(centre: np.ndarray, agents: np.ndarray, tau: float) -> tuple[np.ndarray, np.ndarray]:
    moved = torch.tensor(centre), torch.tensor(agents)
    sync_with_centre(*moved, tau)
    return moved[0].numpy(), moved[1].numpy()


@settings(max_examples=60)
@given(teams(), TAUS)
def test_a_soft_update_stays_between_its_inputs_and_leaves_the_goal_alone(
    team: tuple[np.ndarray, np.ndarray], tau: float
) -> None:
    moved, towards = torch.tensor(team[0]), torch.tensor(team[1][0])
    goal = team[1][0]
    soft_update(towards, moved, tau)
    np.testing.assert_array_equal(towards.numpy(), goal)
    assert (moved.numpy() >= np.minimum(team[0], goal) - 1e-9).all()
    assert (moved.numpy() <= np.maximum(team[0], goal) + 1e-9).all()
    np.testing.assert_allclose(moved, (1 - tau) * team[0] + tau * goal, atol=1e-9)


@settings(max_examples=60)
@given(teams(), TAUS)
def test_a_round_stays_within_the_bounds_of_centre_and_agents(
    team: tuple[np.ndarray, np.ndarray], tau: float
) -> None:
    centre, agents = synced(*team, tau)
    everyone = np.vstack([team[0][None], team[1]])
    for row in (centre, *agents):
        assert (row >= everyone.min(0) - 1e-9).all()
        assert (row <= everyone.max(0) + 1e-9).all()


@settings(max_examples=60)
@given(teams(), TAUS)
def test_a_round_is_the_seeds_loop_over_agents(team: tuple[np.ndarray, np.ndarray], tau: float) -> None:
    centre, agents = team[0].tolist(), team[1].tolist()
    for agent in agents:
        for p in range(len(centre)):
            centre[p] = tau * agent[p] + (1 - tau) * centre[p]
            agent[p] = tau * centre[p] + (1 - tau) * agent[p]
    ours = synced(*team, tau)
    np.testing.assert_allclose(ours[0], centre, atol=1e-9)
    np.testing.assert_allclose(ours[1], agents, atol=1e-9)


def test_agent_1_meets_the_centre_that_agent_0_moved() -> None:
    """tau 1/2: 0 and 4 meet at 2, agent 0 follows to 3; 2 and 8 meet at 5, agent 1 follows to 6.5."""
    centre, agents = synced(np.array([0.0]), np.array([[4.0], [8.0]]), 0.5)
    assert centre.tolist() == [5.0]
    assert agents.tolist() == [[3.0], [6.5]]
    centre, agents = synced(np.array([0.0]), np.array([[8.0], [4.0]]), 0.5)  # the other way round: 4, 6; 4, 4
    assert centre.tolist() == [4.0]
    assert agents.tolist() == [[6.0], [4.0]]


@settings(max_examples=40)
@given(teams())
def test_tau_1_copies_the_last_agent_and_tau_0_moves_nothing(team: tuple[np.ndarray, np.ndarray]) -> None:
    centre, agents = synced(*team, 1.0)
    np.testing.assert_array_equal(centre, team[1][-1])
    np.testing.assert_array_equal(agents, team[1])
    centre, agents = synced(*team, 0.0)
    np.testing.assert_array_equal(centre, team[0])
    np.testing.assert_array_equal(agents, team[1])


@settings(max_examples=40)
@given(teams(), TAUS)
def test_agents_that_stand_on_the_centre_stay_there(team: tuple[np.ndarray, np.ndarray], tau: float) -> None:
    centre, agents = synced(team[0], np.tile(team[0], (3, 1)), tau)
    np.testing.assert_allclose(centre, team[0], atol=1e-9)
    np.testing.assert_allclose(agents, np.tile(team[0], (3, 1)), atol=1e-9)


@settings(max_examples=40)
@given(teams(), TAUS, NUMBERS)
def test_a_common_offset_and_a_common_factor_pass_through(
    team: tuple[np.ndarray, np.ndarray], tau: float, number: float
) -> None:
    plain = synced(*team, tau)
    for ours, here in zip(synced(team[0] + number, team[1] + number, tau), plain, strict=True):
        np.testing.assert_allclose(ours, here + number, atol=1e-8)
    for ours, here in zip(synced(team[0] * number, team[1] * number, tau), plain, strict=True):
        np.testing.assert_allclose(ours, here * number, atol=1e-6)


@settings(max_examples=60)
@given(NUMBERS, NUMBERS, TAUS)
def test_a_pair_keeps_agent_plus_1_minus_tau_centres_and_closes_its_gap_by_1_minus_tau_squared(
    start: float, agent: float, tau: float
) -> None:
    """With gap d = agent - centre, the centre moves by tau d, then the agent by -tau (1 - tau) d."""
    centre, agents = synced(np.array([start]), np.array([[agent]]), tau)
    assert agents[0, 0] + (1 - tau) * centre[0] == pytest.approx(agent + (1 - tau) * start, abs=1e-9)
    assert agents[0, 0] - centre[0] == pytest.approx((1 - tau) ** 2 * (agent - start), abs=1e-9)


def test_rounds_bring_everyone_together() -> None:
    rng = np.random.default_rng(0)
    team = rng.standard_normal(3), rng.standard_normal((4, 3))
    for _ in range(400):
        team = synced(*team, 0.1)
    np.testing.assert_allclose(team[1], np.tile(team[0], (4, 1)), atol=1e-6)


def test_rows_of_a_larger_tensor_are_moved_where_they_are() -> None:
    held = torch.arange(6.0).reshape(3, 2)
    centre = torch.zeros(2)
    sync_with_centre(centre, held[1:], 0.5)
    assert held[0].tolist() == [0.0, 1.0]
    assert centre.tolist() == [2.5, 3.25]
