"""Gymnasium spaces as flat observations and common actions.

Owns what kinds of spaces are understood.  It must not know environments, agents' numbers or hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from actors.environments.team import CommonSpace, FloatArray, TeamEnvironmentError

_FLAT = (
    spaces.Box,
    spaces.Discrete,
    spaces.MultiBinary,
    spaces.MultiDiscrete,
    spaces.Tuple,
    spaces.Dict,
)


def flat_size(space: Any) -> int:
    """The length of an observation once it is flat.

    Raises:
        TeamEnvironmentError: the space, or one inside it, has no flat form of fixed size.
    """
    inside: list[Any] = [space]
    while inside:
        part = inside.pop()
        if not isinstance(part, _FLAT):
            raise TeamEnvironmentError(
                f"observations of a {type(part).__name__} space cannot be flattened; "
                "give the hooks individual_observation and universal_observation"
            )
        if isinstance(part, spaces.Tuple | spaces.Dict):
            inside += part.spaces.values() if isinstance(part, spaces.Dict) else part.spaces
    return int(spaces.flatdim(space))


def flatten(space: Any, observation: Any) -> FloatArray:
    """The observation as float32 [flat_size]; choices become one-hot."""
    if isinstance(space, spaces.Box):
        return np.asarray(observation, np.float32).ravel()
    return np.asarray(spaces.flatten(space, observation), np.float32)


def common_actions(space: Any) -> tuple[CommonSpace, Callable[[FloatArray], Any]]:
    """The common actions that an action space makes, and what turns one of them [size] into an action of the space.

    Raises:
        TeamEnvironmentError: neither discrete nor a box of floats with finite bounds.
    """
    if isinstance(space, spaces.Discrete):
        start, kind = space.start, space.dtype.type
        return CommonSpace(True, int(space.n)), lambda action: kind(start + int(action.argmax()))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = space.low.ravel(), space.high.ravel()
        shape, dtype = space.shape, space.dtype
        try:
            common = CommonSpace(False, low.size, tuple(low.tolist()), tuple(high.tolist()))
        except ValueError as error:
            raise TeamEnvironmentError(f"the action space {space} will not do: {error}; {_REMEDY}") from error
        # Clipped, for a scaled tanh may be outside by a rounding error, which some environments refuse.
        return common, lambda action: np.clip(action, low, high).astype(dtype).reshape(shape)
    raise TeamEnvironmentError(f"the action space {space} is neither Discrete nor a Box of floats; {_REMEDY}")


_REMEDY = "give the hooks common_space and compose_action"
