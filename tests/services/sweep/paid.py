"""An environment whose returns follow from its options alone, so that a test knows which trial is the better one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from actors.environments.ball_grid import BallGrid
from actors.environments.team import FloatArray, IntArray, TeamObservation, TeamStep

_LONGEST_WAIT_S = 240


class Paid(BallGrid):
    """A ball grid in which every agent gets `pay` for each step, whatever it does.

    Args:
        pay: a number.
        pace: seconds that an episode's start takes.
        meet, others: a folder in which trials with different `pay` leave a sign; the first step is taken when there
            are `others` of them.
    """

    def __init__(
        self,
        num_agents: int,
        num_envs: int,
        pay: float,
        pace: float = 0,
        meet: str | None = None,
        others: int = 0,
    ) -> None:
        super().__init__(num_agents=num_agents, num_envs=num_envs, size=4, layouts=4)
        self._pay, self._pace, self._meet, self._others = float(pay), pace, meet, others

    def reset(self, seeds: Sequence[int]) -> TeamObservation:
        time.sleep(self._pace)
        return super().reset(seeds)

    def step(self, common: FloatArray, targets: IntArray) -> TeamStep:
        if self._meet is not None:
            self._wait(Path(self._meet))
            self._meet = None
        outcome = super().step(common, targets)
        return dataclasses.replace(outcome, rewards=np.full_like(outcome.rewards, self._pay))

    def _wait(self, folder: Path) -> None:
        (folder / str(self._pay)).touch()
        end = time.monotonic() + _LONGEST_WAIT_S
        while len(list(folder.iterdir())) < self._others:
            assert time.monotonic() < end, "the other trials did not begin"
            time.sleep(0.05)
