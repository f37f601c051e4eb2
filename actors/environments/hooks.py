"""The five functions with which a user fits an existing environment to the split of observations and actions.

Owns their shapes.  It must not know any environment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from actors.environments.team import BoolArray, CommonSpace, FloatArray

View = Callable[[Any, int, Sequence[Any]], NDArray[Any]]
"""(the agent's observation, its number, the observations of all agents in order) -> 1-D array of a fixed size"""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What may be said about an environment; whatever is left out has a default.

    Observations reach the hooks as the environment returned them.
    """

    individual_observation: View | None = None
    """o_i^d, whose size must not depend on the number of agents.  Default: the agent's observation, flattened."""
    universal_observation: View | None = None
    """o_i^s, the agent's element of the sequence, likewise.  Default: the agent's observation, flattened."""
    compose_action: Callable[[FloatArray, int, Any, int], Any] | None = None
    """(common action [size], target, the agent's observation, its number) -> the environment's action.
    Default: the common action is the environment's own, and the target has no effect."""
    common_space: CommonSpace | None = None
    """The common actions that `compose_action` reads.  Default: the environment's own actions."""
    target_mask: Callable[[Sequence[Any]], BoolArray] | None = None
    """(the observations of all agents) -> [N, N], True where agent i may choose target j.  Default: any other agent,
    or any target where targets are not agents."""
    targets_are_agents: bool = True
    """False where target j is not agent j but, say, a landmark."""
