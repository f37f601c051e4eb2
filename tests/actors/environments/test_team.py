"""The border of a team environment: what is broken is named, with its copy, agent and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from actors.environments.checked import CheckedTeam
from actors.environments.team import (
    CommonSpace,
    FloatArray,
    IntArray,
    TeamEnvironmentError,
    TeamObservation,
    TeamSpace,
    TeamStep,
    check_observation,
    check_step,
    others_mask,
)


class Scripted:
    """Two copies of three agents that return what the test puts into `outcome`."""

    num_envs, num_agents = 2, 3

    def __init__(self, common: CommonSpace) -> None:
        self.space = TeamSpace(individual_size=2, universal_size=1, common=common)
        self.observation = TeamObservation(
            np.zeros((2, 3, 2), np.float32), np.zeros((2, 3, 1), np.float32), others_mask(2, 3)
        )
        nobody = np.zeros(2, bool)
        self.outcome = TeamStep(self.observation, np.zeros((2, 3), np.float32), nobody, nobody)

    def reset(self, seeds: Sequence[int]) -> TeamObservation:
        return self.observation

    def step(self, common: FloatArray, targets: IntArray) -> TeamStep:
        return self.outcome

    def close(self) -> None:
        pass


CONTINUOUS = CommonSpace(False, 2, (-1.0, 0.0), (1.0, 0.3))
TARGETS = np.array([[1, 2, 0], [1, 2, 0]])
MIDDLE = np.full((2, 3, 2), 0.25, np.float32)


def ready(common: CommonSpace = CONTINUOUS) -> tuple[Scripted, CheckedTeam]:
    inner = Scripted(common)
    env = CheckedTeam(inner)
    env.reset([0, 1])
    return inner, env


def seen(step: TeamStep, **arrays: np.ndarray) -> TeamStep:
    return replace(step, observation=replace(step.observation, **arrays))


def spoilt(values: np.ndarray, place: tuple[int, ...], value: float) -> np.ndarray:
    values = values.copy()
    values[place] = value
    return values


def test_what_is_in_order_passes() -> None:
    inner, env = ready()
    assert env.step(MIDDLE, TARGETS) is inner.outcome
    edge = spoilt(MIDDLE, (0, 0, 1), np.float32(0.3))  # above 0.3 in float64
    env.step(edge, TARGETS)


@pytest.mark.parametrize(
    ("common", "targets", "message"),
    [
        (spoilt(MIDDLE, (1, 2, 1), 0.4), TARGETS, r"copy 1, agent 2, step 2: .* 0\.4.* 1 .*\[0\.0, 0\.3\]"),
        (spoilt(MIDDLE, (0, 1, 0), np.nan), TARGETS, r"copy 0, agent 1, step 2: .*nan"),
        (MIDDLE[:, :2], TARGETS, r"common actions have shape \(2, 2, 2\) instead of \(2, 3, 2\)"),
        (MIDDLE, spoilt(TARGETS, (1, 1), 1), r"copy 1, agent 1, step 2: .* target 1; allowed are \[0, 2\]"),
        (MIDDLE, spoilt(TARGETS, (0, 2), 3), r"copy 0, agent 2, step 2: .* target 3"),
        (MIDDLE, spoilt(TARGETS, (0, 2), -1), r"copy 0, agent 2, step 2: .* target -1"),
    ],
)
def test_wrong_actions(common: FloatArray, targets: IntArray, message: str) -> None:
    _, env = ready()
    env.step(MIDDLE, TARGETS)
    with pytest.raises(TeamEnvironmentError, match=message):
        env.step(common, targets)


@pytest.mark.parametrize("row", [[0.5, 0.5, 0], [1, 1, 0], [0, 0, 0], [2, -1, 0], [np.nan, 1, 0]])
def test_discrete_actions_are_one_hot(row: list[float]) -> None:
    _, env = ready(CommonSpace(True, 3))
    common = np.tile(np.array([0, 0, 1], np.float32), (2, 3, 1))
    env.step(common, TARGETS)
    common[1, 0] = row
    with pytest.raises(TeamEnvironmentError, match=r"copy 1, agent 0, step 2: .* one of 3 choices"):
        env.step(common, TARGETS)


def test_broken_rewards_observations_and_masks() -> None:
    inner, env = ready()
    good = inner.outcome
    empty = good.observation.target_mask.copy()
    empty[1, 2] = False
    for outcome, message in (
        (
            replace(good, rewards=spoilt(good.rewards, (1, 0), np.nan)),
            "copy 1, agent 0, step 1: the reward is nan",
        ),
        (
            replace(
                good,
                observation=replace(
                    good.observation, individual=spoilt(np.zeros((2, 3, 2)), (0, 2, 1), np.inf)
                ),
            ),
            "copy 0, agent 2, step 1: the individual observation is inf at position 1",
        ),
        (
            replace(
                good,
                observation=replace(
                    good.observation, universal=spoilt(np.zeros((2, 3, 1)), (1, 1, 0), np.nan)
                ),
            ),
            "copy 1, agent 1, step 1: the universal observation is nan at position 0",
        ),
        (
            seen(good, target_mask=empty),
            "copy 1, agent 2, step 1: the mask leaves no target",
        ),
        (
            replace(good, rewards=np.zeros((2, 2), np.float32)),
            r"rewards have shape \(2, 2\) instead of \(2, 3\)",
        ),
        (replace(good, terminated=np.zeros(2)), r"terminated are float64 instead of bool"),
    ):
        inner.outcome = outcome
        env.reset([0, 1])
        with pytest.raises(TeamEnvironmentError, match=message):
            env.step(MIDDLE, TARGETS)


def test_what_an_ended_copy_gets_and_returns_is_ignored() -> None:
    inner, env = ready()
    good = inner.outcome
    inner.outcome = replace(good, terminated=np.array([False, True]))
    env.step(MIDDLE, TARGETS)
    inner.outcome = replace(good, rewards=spoilt(good.rewards, (1, 0), np.nan))
    env.step(spoilt(MIDDLE, (1, 0, 0), 7), spoilt(TARGETS, (1, 0), 0))
    with pytest.raises(TeamEnvironmentError, match="copy 0, agent 0, step 3"):
        env.step(spoilt(MIDDLE, (0, 0, 0), 7), TARGETS)
    env.reset([0, 1])
    with pytest.raises(TeamEnvironmentError, match="copy 1, agent 0, step 1"):
        env.step(spoilt(MIDDLE, (1, 0, 0), 7), TARGETS)


def test_checks_without_a_guard_take_one_step_number() -> None:
    good = Scripted(CONTINUOUS).outcome
    check_observation(good.observation, 0)
    with pytest.raises(TeamEnvironmentError, match="copy 0, agent 1, step 4: the reward is inf"):
        check_step(replace(good, rewards=spoilt(good.rewards, (0, 1), np.inf)), 4)


def test_order_of_calls() -> None:
    env = CheckedTeam(Scripted(CONTINUOUS))
    with pytest.raises(TeamEnvironmentError, match="before the first reset"):
        env.step(MIDDLE, TARGETS)
    with pytest.raises(TeamEnvironmentError, match="3 seeds for 2 copies"):
        env.reset([1, 2, 3])


def test_an_only_agent_may_choose_itself() -> None:
    np.testing.assert_array_equal(others_mask(1, 1), [[[True]]])
    np.testing.assert_array_equal(others_mask(1, 2), [[[False, True], [True, False]]])
