"""A team environment whose border is guarded: nothing broken gets in or out unnoticed.

Owns the count of steps and which episodes are running.  It must not know what environment it guards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.environments.team import (
    FloatArray,
    IntArray,
    TeamEnvironment,
    TeamEnvironmentError,
    TeamObservation,
    TeamStep,
    check_actions,
    check_observation,
    check_shapes,
    check_step,
)


class CheckedTeam:
    """Passes everything on to `inner` and checks actions, observations and rewards of running episodes on the way."""

    def __init__(self, inner: TeamEnvironment) -> None:
        self.inner = inner
        self.space = inner.space
        self.num_envs = inner.num_envs
        self.num_agents = inner.num_agents
        self._observation: TeamObservation | None = None
        self._step = 0  # all copies start together
        self._running = np.zeros(self.num_envs, bool)

    def reset(self, seeds: Sequence[int]) -> TeamObservation:
        """As `TeamEnvironment.reset`.

        Raises:
            TeamEnvironmentError: not one seed for each copy, or what `check_shapes` and `check_observation` refuse.
        """
        if len(seeds) != self.num_envs:
            raise TeamEnvironmentError(f"{len(seeds)} seeds for {self.num_envs} copies; give one to each")
        observation = self.inner.reset(seeds)
        self._step, self._running = 0, np.ones(self.num_envs, bool)
        check_shapes(self.space, self.num_envs, self.num_agents, observation, None)
        check_observation(observation, self._step)
        self._observation = observation
        return observation

    def step(self, common: FloatArray, targets: IntArray) -> TeamStep:
        """As `TeamEnvironment.step`; in error messages an episode's first step is step 1.

        Raises:
            TeamEnvironmentError: no `reset` yet, or what `check_actions`, `check_shapes` and `check_step` refuse.
        """
        if self._observation is None:
            raise TeamEnvironmentError("step before the first reset; call reset with one seed for each copy")
        self._step += 1
        check_actions(self.space, self._observation, common, targets, step=self._step, running=self._running)
        outcome = self.inner.step(common, targets)
        check_shapes(self.space, self.num_envs, self.num_agents, outcome.observation, outcome)
        check_step(outcome, self._step, running=self._running)
        self._running = self._running & ~(outcome.terminated | outcome.truncated)
        self._observation = outcome.observation
        return outcome

    def close(self) -> None:
        """Close `inner`."""
        self.inner.close()
