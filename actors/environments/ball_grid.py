"""The seed's example: arms on a grid that throw a ball to one another towards a goal.

Owns the rules and the random numbers of the game, for all copies at once.  It must not know who plays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from actors.environments.checked import CheckedTeam
from actors.environments.team import (
    BoolArray,
    CommonSpace,
    FloatArray,
    IntArray,
    TeamEnvironment,
    TeamObservation,
    TeamSpace,
    TeamStep,
)

MOVES = np.array([[0, 1], [0, -1], [-1, 0], [1, 0], [0, 0]])
"""(x, y) of the throws up, down, left, right and stay: the common action, in this order."""
STAY = 4

_Words = NDArray[np.uint64]
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


class BallGrid:
    """N arms on distinct cells of a grid, one of which holds the ball; E copies.

    Only the holder's action counts.  Its direction is right if it leads closer to the goal (L1 distance; either axis
    that helps), or is `stay` where the holder stands on the goal.  Then the ball flies to the arm j it is aimed at, the
    holder is rewarded with j's closeness to the goal, `(d_max - d_j) / (d_max - d_min)` over the L1 distances d of all
    arms but the holder (1 if they are equal), j holds the ball, and a new goal is drawn.  A wrong direction changes
    nothing and earns nothing; nor does anything the other arms do, who may aim at the holder only: they watch the
    ball.  So the best return is 1 a step, and the right target depends on where all arms are, which no arm sees in its
    own view.

    Universal element of an arm [5]: x, y, 1 if it holds the ball, goal x, goal y; coordinates from 0 to 1.
    Individual observation [5]: 1 if it holds the ball, goal - arm (x, y), ball - arm (x, y); in widths of the grid.

    Args:
        num_agents: N, 2 to size * size.
        num_envs: E.
        size: Cells along each side of the grid.
        layouts: How many sets of positions there are; each episode picks one.
        goals: How many cells can be the goal: the four corners first, then others.
        episode_steps: Steps after which an episode is truncated; it never terminates.
        layout_seed: What positions and further goals are drawn from.

    Raises:
        ValueError: an argument out of range, by name.
    """

    def __init__(
        self,
        *,
        num_agents: int,
        num_envs: int,
        size: int = 5,
        layouts: int = 16,
        goals: int = 4,
        episode_steps: int = 25,
        layout_seed: int = 0,
    ) -> None:
        cells = size * size
        for name, value, least, most in (
            ("num_envs", num_envs, 1, None),
            ("size", size, 2, None),
            ("num_agents", num_agents, 2, cells),
            ("layouts", layouts, 1, None),
            ("goals", goals, 1, cells),
            ("episode_steps", episode_steps, 1, None),
            ("layout_seed", layout_seed, 0, None),
        ):
            if value < least or (most is not None and value > most):
                upper = f" and at most {most}, the cells of the grid" if most is not None else ""
                raise ValueError(f"ball_grid: {name} is {value}; it must be at least {least}{upper}")
        self.space = TeamSpace(individual_size=5, universal_size=5, common=CommonSpace(True, len(MOVES)))
        self.num_envs, self.num_agents = num_envs, num_agents
        self._episode_steps, self._scale = episode_steps, np.float32(1 / (size - 1))
        self._place(_layouts(size, num_agents, layouts, layout_seed), _goals(size, goals, layout_seed))
        self._rows = np.arange(num_envs)
        self._key: _Words = np.zeros(num_envs, np.uint64)
        self._draws, self._steps, self._layout, self._holder, self._goal = np.zeros((5, num_envs), np.int64)

    def reset(self, seeds: Sequence[int]) -> TeamObservation:
        """Draw layout, holder and goal of every copy from its seed."""
        self._key = _mix(np.array(seeds, dtype=np.uint64))
        self._draws, self._steps = np.zeros((2, self.num_envs), np.int64)
        self._layout = self._draw(len(self._positions))
        self._holder = self._draw(self.num_agents)
        self._goal = self._draw(len(self._goals))
        return self._observe()

    def step(self, common: FloatArray, targets: IntArray) -> TeamStep:
        """Let every copy's holder throw; copies whose episode has ended stay as they are."""
        rows, holder = self._rows, self._holder
        running = self._steps < self._episode_steps
        move = common[rows, holder].argmax(-1)
        right = running & self._right[self._layout, holder, self._goal, move]
        target = np.where(right, targets[rows, holder], holder)
        rewards = np.zeros((self.num_envs, self.num_agents), np.float32)
        rewards[rows, holder] = np.where(right, self._closeness(target), 0)
        self._holder = target
        self._goal = np.where(right, self._draw(len(self._goals)), self._goal)
        self._steps = self._steps + running
        ended = self._steps >= self._episode_steps
        return TeamStep(self._observe(), rewards, terminated=np.zeros(self.num_envs, bool), truncated=ended)

    def close(self) -> None:
        """Nothing is held."""

    def best_actions(self) -> tuple[FloatArray, IntArray]:
        """Actions that earn 1 in every copy: a right direction, and the arm nearest to the goal."""
        rows, holder = self._rows, self._holder
        move = np.full((self.num_envs, self.num_agents), STAY)
        move[rows, holder] = self._right[self._layout, holder, self._goal].argmax(-1)
        targets = np.repeat(holder[:, None], self.num_agents, 1)
        targets[rows, holder] = self._distances(np.inf).argmin(-1)
        return np.eye(len(MOVES), dtype=np.float32)[move], targets

    def _place(self, positions: IntArray, goals: IntArray) -> None:
        """Play on `positions` [layouts, N, 2] with `goals` [goals, 2]; makes the tables that hold in every episode."""
        self._positions, self._goals = positions, goals
        way = goals - positions[:, :, None]  # [layout, arm, goal, 2]
        away = np.abs(way).sum(-1)
        self._distance = away.astype(np.float32)
        right = np.abs(way[..., None, :] - MOVES).sum(-1) < away[..., None]
        right[..., STAY] = away == 0
        self._right = right  # [layout, arm, goal, move]

    def _closeness(self, target: IntArray) -> FloatArray:
        """The reward [E] for a right throw at `target` [E]; where that is the holder itself, nobody may read it."""
        nearest, farthest = self._distances(np.inf).min(-1), self._distances(-np.inf).max(-1)
        spread = farthest - nearest
        distance = self._distance[self._layout, target, self._goal]
        closeness: FloatArray = np.ones(self.num_envs, np.float32)
        np.divide(farthest - distance, spread, out=closeness, where=spread > 0)
        return closeness

    def _distances(self, holders: float) -> FloatArray:
        """The arms' distances to the goal [E, N], with `holders` in place of the holder's."""
        distances: FloatArray = self._distance[self._layout, :, self._goal]
        distances[self._rows, self._holder] = holders
        return distances

    def _observe(self) -> TeamObservation:
        rows, holder, shape = self._rows, self._holder, (self.num_envs, self.num_agents)
        cells = self._positions[self._layout]
        goal, ball = self._goals[self._goal][:, None], cells[rows, holder][:, None]
        individual, universal = np.zeros((2, *shape, 5), np.float32)
        individual[rows, holder, 0] = universal[rows, holder, 2] = 1
        individual[..., 1:3] = (goal - cells) * self._scale
        individual[..., 3:5] = (ball - cells) * self._scale
        universal[..., 0:2] = cells * self._scale
        universal[..., 3:5] = goal * self._scale
        mask: BoolArray = np.zeros((*shape, self.num_agents), bool)
        mask[rows, :, holder] = True
        mask[rows, holder] = True
        mask[rows, holder, holder] = False
        return TeamObservation(individual, universal, mask)

    def _draw(self, choices: int) -> IntArray:
        """Every copy's next random number below `choices` [E]: a function of its seed and of how many came before."""
        self._draws = self._draws + 1
        mixed = _mix(self._key + self._draws.astype(np.uint64) * _GAMMA)
        return (mixed % np.uint64(choices)).astype(np.int64)


def oracle_actions(environment: TeamEnvironment) -> tuple[FloatArray, IntArray]:
    """The best actions in a ball grid, checked or not: common [E, N, 5], targets [E, N]."""
    inner = environment.inner if isinstance(environment, CheckedTeam) else environment
    if not isinstance(inner, BallGrid):
        raise TypeError(f"only a ball grid has known best actions, not a {type(inner).__name__}")
    return inner.best_actions()


def _layouts(size: int, num_agents: int, layouts: int, seed: int) -> IntArray:
    """Positions [layouts, N, 2] (x, y), distinct within a layout."""
    rng = np.random.default_rng([seed, num_agents])
    chosen = rng.random((layouts, size * size)).argsort(-1)[:, :num_agents]
    positions: IntArray = np.stack([chosen % size, chosen // size], -1)
    return positions


def _goals(size: int, goals: int, seed: int) -> IntArray:
    """Goal cells [goals, 2]: opposite corners first, then the other cells in an order drawn from `seed`."""
    far = size - 1
    corners = np.array([[0, 0], [far, far], [0, far], [far, 0]])
    rest = np.setdiff1d(np.arange(size * size), corners @ [1, size])
    rest = np.random.default_rng([seed, 0]).permutation(rest)
    cells: IntArray = np.concatenate([corners, np.stack([rest % size, rest // size], -1)])
    return cells[:goals]


def _mix(words: _Words) -> _Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), elementwise."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
