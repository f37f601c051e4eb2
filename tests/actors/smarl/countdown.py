"""A team whose every number is known in advance, runners for it and for the ball grid, and what they collect."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from actors.environments.team import CommonSpace, FloatArray, IntArray, TeamObservation, TeamSpace, TeamStep
from actors.smarl.runner import EnvironmentSpec, PointerSpec, RunnerSpec, TeamRunner
from learners.smarl.common_action import Exploration
from learners.smarl.ddpg import Networks

SEED = 11
HOW = Exploration(noise=0.2, epsilon=0.1, temperature=1.0)
POINTER = PointerSpec(universal_size=5, hidden=6, attention="additive")


class Countdown:
    """Episodes of 2 to 5 steps, by seed; even seeds end terminated, odd ones truncated.

    Step t (from 1) earns agent i `10 t + i`; observations tell agent and t.  What an ended copy returns is rubbish.
    """

    def __init__(self, num_agents: int, num_envs: int, space: TeamSpace) -> None:
        self.space = space
        self.num_envs, self.num_agents = num_envs, num_agents
        self.actions: list[FloatArray] = []
        self.targets: list[IntArray] = []
        self.seen: list[TeamObservation] = []

    def reset(self, seeds: Sequence[int]) -> TeamObservation:
        self.seeds = np.array(seeds)
        self.lengths = 2 + self.seeds % 4
        self.time = 0
        return self._observe()

    def step(self, common: FloatArray, targets: IntArray) -> TeamStep:
        self.actions.append(common)
        self.targets.append(targets)
        self.time += 1
        rewards = np.tile(10 * self.time + np.arange(self.num_agents), (self.num_envs, 1)).astype(np.float32)
        rewards[self.time > self.lengths] = np.nan
        ends = self.time >= self.lengths
        return TeamStep(self._observe(), rewards, ends & (self.seeds % 2 == 0), ends & (self.seeds % 2 == 1))

    def close(self) -> None:
        pass

    def _observe(self) -> TeamObservation:
        shape = (self.num_envs, self.num_agents)
        individual = np.zeros((*shape, 3), np.float32)
        individual[..., 0] = np.arange(self.num_agents)
        individual[..., 1] = self.time
        individual[..., 2] = np.sin(self.seeds)[:, None]
        universal = np.repeat(individual.sum(-1, keepdims=True), 5, -1)
        mask = np.tile(~np.eye(self.num_agents, dtype=bool), (self.num_envs, 1, 1))
        over = self.time > self.lengths
        individual[over], universal[over], mask[over] = np.nan, np.nan, False
        observation = TeamObservation(individual, universal, mask)
        self.seen.append(observation)
        return observation


class Tables:
    """Makes countdowns, and keeps hold of them."""

    def __init__(self, common: CommonSpace | None = None, *, has_targets: bool = True) -> None:
        self.made: list[Countdown] = []
        self.space = TeamSpace(3, 5, common or CommonSpace(True, 4), has_targets=has_targets)

    def __call__(self, num_agents: int, num_envs: int) -> Countdown:
        self.made.append(Countdown(num_agents, num_envs, self.space))
        return self.made[-1]

    def spec(self, **changes: Any) -> RunnerSpec:
        networks = Networks.of(3, self.space.common, (8,))
        pointer = POINTER if self.space.has_targets else None
        values = {"networks": networks, "max_steps": 50, "seed": SEED, "pointer": pointer}
        return RunnerSpec(environment=EnvironmentSpec(self), **{**values, **changes})


def ball_grid(**changes: Any) -> RunnerSpec:
    values = {
        "environment": EnvironmentSpec("ball_grid", {"episode_steps": 7}),
        "networks": Networks.of(5, CommonSpace(True, 5), (8,)),
        "max_steps": 50,
        "seed": SEED,
        "pointer": POINTER,
    }
    return RunnerSpec(**{**values, **changes})


def rows(spec: RunnerSpec, agents: int, seed: int = 0) -> np.ndarray:
    shape = spec.networks.actor
    return np.random.default_rng(seed).standard_normal((agents, shape.num_parameters)).astype(np.float32)


def able(spec: RunnerSpec, agents: int) -> np.ndarray:
    """Actors that throw towards the goal, so that returns on the grid hang on targets."""
    hidden = np.zeros((8, 5))
    hidden[:4, 1:3] = [[0, 1], [0, -1], [-1, 0], [1, 0]]  # up, down, left, right, by goal - arm
    row = spec.networks.actor.flatten(
        [(hidden, np.zeros(8)), (np.eye(5, 8), np.array([0, 0, 0, 0, 0.01]))]  # else stay
    )
    return np.tile(row.astype(np.float32), (agents, 1))


def runner(spec: RunnerSpec, agents: int = 3, envs: int = 4, weights: int = 0) -> TeamRunner:
    """A runner whose target network has the weights of `torch.manual_seed(weights)`."""
    made = TeamRunner(spec, agents, envs)
    if spec.pointer is not None:
        torch.manual_seed(weights)
        made.set_target(spec.pointer.build().weights())
    return made


def play(of: TeamRunner, actors: np.ndarray, episodes: Sequence[int], *pieces: int) -> dict[str, np.ndarray]:
    """The steps of `episodes`, collected in `pieces`, put together again."""
    of.start(episodes)
    chunks = []
    for steps in pieces:
        chunk, sequences, _ = of.collect(steps, HOW, actors)
        assert sequences is not None
        chunks.append((chunk, sequences))
    for (before, _), (after, _) in pairwise(chunks):
        np.testing.assert_array_equal(before.observations[-1], after.observations[0])
    whole = {
        name: np.concatenate([getattr(chunk, name) for chunk, _ in chunks])
        for name in ("actions", "rewards", "terminated", "alive")
    }
    whole["observations"] = np.concatenate(
        [chunks[0][0].observations[:1], *(chunk.observations[1:] for chunk, _ in chunks)]
    )
    for name in ("observations", "targets", "rewards", "masks"):
        whole[f"sequence_{name}"] = np.concatenate([getattr(sequences, name) for _, sequences in chunks])
    return whole
