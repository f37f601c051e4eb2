"""Makes the team environment that a name or a function stands for.

Owns the names.  It must not know where functions come from: texts that name one are resolved before they get here.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from actors.environments.ball_grid import BallGrid
from actors.environments.checked import CheckedTeam
from actors.environments.hooks import Hooks
from actors.environments.multi_agent import MultiAgentTeam
from actors.environments.simple_spread import simple_spread
from actors.environments.team import TeamEnvironment, TeamEnvironmentError

GYMNASIUM = "gymnasium:"

BUILT_IN: dict[str, Callable[..., TeamEnvironment]] = {"ball_grid": BallGrid, "simple_spread": simple_spread}


def is_reference(name: str) -> bool:
    """Whether `name` names a function (`module:function`, `file.py:function`): `make_environment` wants that itself."""
    return ":" in name and not name.startswith(GYMNASIUM)


def make_environment(
    name: str | Callable[..., Any],
    options: Mapping[str, Any],
    hooks: Hooks | None = None,
    *,
    num_agents: int,
    num_envs: int,
) -> CheckedTeam:
    """`num_envs` copies of an environment with `num_agents` agents, guarded by `CheckedTeam`.

    `name` is one of
    - `ball_grid`, `simple_spread`, with their own options;
    - `gymnasium:<id>`, a single agent; options go to `gymnasium.make`;
    - a name under which `ray.tune.registry.register_env` knows an environment; its creator gets the options and
      `num_agents` as its config;
    - a function that returns a team environment, a PettingZoo parallel environment, an RLlib `MultiAgentEnv` or a
      Gymnasium environment.  It gets the options and, where its signature has them by name, `num_agents` and
      `num_envs`; or, where all it takes is a `config`, options and `num_agents` in that one mapping, as RLlib's do.
      It is called once for each copy, but once in all where it returns a team environment.

    `hooks` split the observations and actions of foreign environments.

    Raises:
        ValueError: an unknown name or option, with the nearest known one; an option out of range; more than one agent
            for a Gymnasium environment; hooks where they have no effect.
        TeamEnvironmentError: the environment does not fit; see `MultiAgentTeam`.
    """
    if num_agents < 1 or num_envs < 1:
        raise ValueError(f"num_agents is {num_agents} and num_envs {num_envs}; both must be at least 1")
    return CheckedTeam(_make(name, options, hooks, num_agents, num_envs))


def _make(
    name: str | Callable[..., Any],
    options: Mapping[str, Any],
    hooks: Hooks | None,
    num_agents: int,
    num_envs: int,
) -> TeamEnvironment:
    if not isinstance(name, str):
        return _call(name, options, hooks, num_agents, num_envs)
    if name in BUILT_IN:
        return _built_in(name, options, hooks, num_agents, num_envs)
    if name.startswith(GYMNASIUM):
        if num_agents != 1:
            raise ValueError(f"{name!r} has a single agent, but num_agents is {num_agents}; set it to 1")
        return _gymnasium(name.removeprefix(GYMNASIUM), options, hooks, num_envs)
    if is_reference(name):
        raise ValueError(f"{name!r} names a function; pass the function itself")
    creator, registered = _registered(name)
    if creator is None:
        known = [*BUILT_IN, *registered]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"there is no environment {name!r}; {hint}Known are {', '.join(known)}, gymnasium:<id>, "
            "and module:function or file.py:function"
        )
    return _wrap(lambda: creator(_config(options, num_agents)), hooks, num_agents, num_envs)


def _built_in(
    name: str, options: Mapping[str, Any], hooks: Hooks | None, num_agents: int, num_envs: int
) -> TeamEnvironment:
    make = BUILT_IN[name]
    parameters = set(inspect.signature(make).parameters)
    known = sorted(parameters - {"num_agents", "num_envs", "hooks"})
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{name} has no option {option!r}; {hint}Known are {', '.join(known)}")
    if hooks is None:
        return make(num_agents=num_agents, num_envs=num_envs, **options)
    if "hooks" not in parameters:
        raise ValueError(f"hooks have no effect on {name}; leave them out")
    return make(num_agents=num_agents, num_envs=num_envs, hooks=hooks, **options)


def _gymnasium(
    identifier: str, options: Mapping[str, Any], hooks: Hooks | None, num_envs: int
) -> TeamEnvironment:
    import gymnasium

    # Its checker warns once about habits that do no harm, and CheckedTeam looks at every step.
    arguments = {"disable_env_checker": True, **options}
    return _wrap(lambda: gymnasium.make(identifier, **arguments), hooks, 1, num_envs)


def _call(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    hooks: Hooks | None,
    num_agents: int,
    num_envs: int,
) -> TeamEnvironment:
    parameters = inspect.signature(function).parameters
    if len(parameters) == 1 and set(parameters) <= {"config", "env_config"}:
        return _wrap(lambda: function(_config(options, num_agents)), hooks, num_agents, num_envs)
    given = {"num_agents": num_agents, "num_envs": num_envs}
    arguments = {**options, **{key: value for key, value in given.items() if key in parameters}}
    return _wrap(lambda: function(**arguments), hooks, num_agents, num_envs)


def _wrap(make: Callable[[], Any], hooks: Hooks | None, num_agents: int, num_envs: int) -> TeamEnvironment:
    first = make()
    if all(hasattr(first, name) for name in ("space", "num_envs", "num_agents", "reset", "step")):
        if (first.num_agents, first.num_envs) != (num_agents, num_envs):
            raise TeamEnvironmentError(
                f"the function made {first.num_envs} copies with {first.num_agents} agents each instead of "
                f"{num_envs} with {num_agents}; let it take num_agents and num_envs and heed them"
            )
        if hooks is not None:
            raise ValueError(
                f"hooks have no effect on the team environment {type(first).__name__}; leave them out"
            )
        team: TeamEnvironment = first
        return team
    environments = [first, *(make() for _ in range(num_envs - 1))]
    return MultiAgentTeam(environments, num_agents=num_agents, hooks=hooks)


def _config(options: Mapping[str, Any], num_agents: int) -> Any:
    """RLlib's form of options; creators may ask it for `worker_index` as well."""
    from ray.rllib.env.env_context import EnvContext

    return EnvContext({**options, "num_agents": num_agents}, worker_index=0)


def _registered(name: str) -> tuple[Callable[..., Any] | None, list[str]]:
    """The creator registered as `name`, or None and the names that this process registered."""
    from ray.tune.registry import ENV_CREATOR, _global_registry

    if _global_registry.contains(ENV_CREATOR, name):
        return _global_registry.get(ENV_CREATOR, name), []
    here = [*_global_registry._to_flush, *_global_registry._registered]
    return None, sorted({key for category, key in here if category == ENV_CREATOR})
