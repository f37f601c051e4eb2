"""mpe2's simple_spread: N agents are to cover N landmarks; the individual action is the landmark.

Owns the split of its observations and actions.  It must not know who chooses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.environments.hooks import Hooks
from actors.environments.multi_agent import MultiAgentTeam
from actors.environments.team import CommonSpace, FloatArray

Vectors = NDArray[np.floating]


def simple_spread(
    *,
    num_agents: int,
    num_envs: int,
    max_cycles: int = 25,
    continuous_actions: bool = True,
    local_ratio: float = 0.5,
    hooks: Hooks | None = None,
) -> MultiAgentTeam:
    """E copies of `mpe2.simple_spread_v3` with N agents and landmarks; options are mpe2's own.

    Universal element i [6]: position and velocity of agent i, position of landmark i.  Individual observation [8]: own
    velocity and position, offset to the nearest landmark and to the nearest other agent (zeros if there is none).

    Common actions are relative to the landmark chosen as target.  Continuous, [-1, 1]^2: force towards it, and force
    across, to its left.  Discrete, 5: none, towards, away, left, right, of which mpe2's nearest move is made.  At the
    landmark itself there is no direction, and no force.

    `hooks` take the place of these, all together.
    """
    # Imported here, for it takes a second that other environments need not spend.
    from mpe2 import simple_spread_v3

    environments = [
        simple_spread_v3.parallel_env(
            N=num_agents,
            max_cycles=max_cycles,
            continuous_actions=continuous_actions,
            local_ratio=local_ratio,
        )
        for _ in range(num_envs)
    ]
    own = hooks or spread_hooks(num_agents, continuous_actions)
    return MultiAgentTeam(environments, num_agents=num_agents, hooks=own)


def spread_hooks(num_agents: int, continuous: bool) -> Hooks:
    """How `simple_spread` is split.  Its observations hold own velocity and position, then offsets (see `_offsets`)."""

    def individual(own: FloatArray, agent: int, everyone: Sequence[FloatArray]) -> FloatArray:
        landmarks, others = _offsets(own, num_agents)
        return np.concatenate([own[:4], _nearest(landmarks), _nearest(others)])

    def universal(own: FloatArray, agent: int, everyone: Sequence[FloatArray]) -> FloatArray:
        velocity, position = own[:2], own[2:4]
        return np.concatenate([position, velocity, position + _offsets(own, num_agents)[0][agent]])

    def compose(common: FloatArray, target: int, own: FloatArray, agent: int) -> Any:
        offset = _offsets(own, num_agents)[0][target].astype(np.float64)
        distance = np.hypot(offset[0], offset[1])
        ahead = offset / distance if distance > 0 else np.zeros(2)
        left = np.array([-ahead[1], ahead[0]])
        if continuous:
            return _push(common[0] * ahead + common[1] * left)
        return _nearest_move((np.zeros(2), ahead, -ahead, left, -left)[int(common.argmax())])

    return Hooks(
        individual_observation=individual,
        universal_observation=universal,
        compose_action=compose,
        common_space=CommonSpace(False, 2, (-1.0, -1.0), (1.0, 1.0)) if continuous else CommonSpace(True, 5),
        targets_are_agents=False,
    )


def _offsets(own: FloatArray, num_agents: int) -> tuple[Vectors, Vectors]:
    """Offsets to the landmarks [N, 2] and to the other agents [N-1, 2]; what follows them is their silence."""
    split = 4 + 2 * num_agents
    return own[4:split].reshape(-1, 2), own[split : split + 2 * (num_agents - 1)].reshape(-1, 2)


def _nearest(offsets: Vectors) -> Vectors:
    if len(offsets) == 0:
        return np.zeros(2, np.float32)
    nearest: Vectors = offsets[np.square(offsets).sum(-1).argmin()]
    return nearest


def _push(force: Vectors) -> FloatArray:
    """mpe2's action (none, left, right, down, up), each 0 to 1, for a force whose components it can only give up to 1.

    A larger force keeps its direction, where clipping would turn it.
    """
    force = force / max(1.0, np.abs(force).max())
    back, forth = np.maximum(-force, 0), np.maximum(force, 0)
    return np.array([0, back[0], forth[0], back[1], forth[1]], np.float32)


def _nearest_move(direction: Vectors) -> int:
    """mpe2's move (0 none, 1 left, 2 right, 3 down, 4 up) along the larger component."""
    if not direction.any():
        return 0
    axis = int(abs(direction[1]) > abs(direction[0]))
    return 2 * axis + 1 + int(direction[axis] > 0)
