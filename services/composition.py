"""What a run is made of: which model, tokenizer and formatter belongs to which agent and critic.

Works for names and for objects alike. This module opens nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from services.callables import resolve
from services.config.algorithm import ActorCriticConfig, IACConfig
from services.config.base import ConfigError, Problems

Function = Callable[..., Any]


class Models(NamedTuple):
    """What a run is made of, each a folder, a hub name or an object."""

    agents: list[Any]
    """One for each agent."""
    critics: list[Any]
    """MAAC: one. IAC: one for each agent, or none with a shared backbone."""
    tokenizers: list[Any]
    """One for each agent."""


def models_of(
    args: ActorCriticConfig,
    agent_model: Any = None,
    agents: Sequence[Any] | None = None,
    critic_model: Any = None,
    critics: Sequence[Any] | None = None,
    tokenizer: Any = None,
) -> Models:
    """The models of every agent and critic, spread out as the algorithm needs them; nothing is opened.

    One name given for several agents or critics stands for as many models, loaded apart; one object is shared. A
    tokenizer that is not given is that of its agent's folder. Raises ConfigError, which lists all problems.
    """
    models, problems = find_models(args, agent_model, agents, critic_model, critics, tokenizer)
    if problems:
        raise ConfigError(problems)
    return models


def find_models(
    args: ActorCriticConfig,
    agent_model: Any = None,
    agents: Sequence[Any] | None = None,
    critic_model: Any = None,
    critics: Sequence[Any] | None = None,
    tokenizer: Any = None,
) -> tuple[Models, list[str]]:
    """As `models_of`, but with the problems beside what could be found: lists may be too short and hold None."""
    problems = Problems()
    agent_list = _agents_of(problems, args.num_agents, agent_model, agents)
    critic_list = _critics_of(problems, args, critic_model, critics)
    tokenizer_list = _tokenizers_of(problems, args.num_agents, agent_list, tokenizer)
    return Models(agent_list, critic_list, tokenizer_list), problems.found


def formatters_of(num_agents: int, formatters: Any) -> list[Function | None]:
    """Each agent's formatter, None where it takes the row's `prompt`. Raises ConfigError."""
    problems = Problems()
    if not isinstance(formatters, list | tuple):
        one = problems.collect("formatters", resolve, formatters) if formatters is not None else None
        found = [one] * num_agents
    else:
        if len(formatters) != num_agents:
            problems.add("formatters", _count("formatter", len(formatters), num_agents, "one for all"))
        found = [
            problems.collect(f"formatters[{index}]", resolve, each) if each is not None else None
            for index, each in enumerate(formatters)
        ]
    problems.refuse()
    return found


def transition_problems(args: ActorCriticConfig, external_transition: Any) -> list[str]:
    """What is wrong with the transition of a run of several turns."""
    if args.num_turns == 1 or external_transition is not None:
        return []
    return [
        f"external_transition: missing, but args.num_turns={args.num_turns}: give the function that makes the prompts "
        "of later turns, or set args.num_turns=1"
    ]


def _agents_of(
    problems: Problems, num_agents: int, agent_model: Any, agents: Sequence[Any] | None
) -> list[Any]:
    if agents is not None:
        if agent_model is not None:
            problems.add("agent_model", "given together with agents; give one of the two")
        if isinstance(agents, str | Path) or not isinstance(agents, Sequence):
            problems.add(
                "agents", f"{agents!r} is no list; give one model for each agent, or use agent_model"
            )
            return []
        if len(agents) != num_agents:
            problems.add("agents", _count("model", len(agents), num_agents, "agent_model"))
        return list(agents)
    if agent_model is None:
        problems.add(
            "agent_model", "missing; give agent_model for equal agents, or agents with a model for each"
        )
    elif num_agents > 1 and not isinstance(agent_model, str | Path):
        problems.add(
            "agent_model",
            f"is of type {type(agent_model).__name__}; several agents need a folder or hub name, from which each "
            f"loads its own, or agents with {num_agents} models",
        )
    return [agent_model] * num_agents


def _critics_of(
    problems: Problems, args: ActorCriticConfig, critic_model: Any, critics: Sequence[Any] | None
) -> list[Any]:
    count = args.num_critic_models
    if isinstance(critic_model, list | tuple):
        problems.add("critic_model", "is a list; give one model, or use critics for a list")
        return []
    if count == 0:
        for key, given in (("critic_model", critic_model), ("critics", critics)):
            if given is not None:
                problems.add(
                    key,
                    "given, but args.use_separate_critic=false puts the critics on the agents' backbones: leave "
                    f"{key} out, or set args.use_separate_critic=true",
                )
        return []
    if critics is None:
        if critic_model is None:
            problems.add("critic_model", "missing; " + _CRITIC_REMEDY[isinstance(args, IACConfig)])
        return [critic_model] * count
    if critic_model is not None:
        problems.add("critic_model", "given together with critics; give one of the two")
    if isinstance(critics, str | Path) or not isinstance(critics, Sequence):
        problems.add("critics", f"{critics!r} is no list; use critic_model for a single model")
        return []
    if len(critics) != count:
        problems.add("critics", _count("model", len(critics), count, "critic_model"))
    return list(critics)


_CRITIC_REMEDY = {
    False: "give the model of the one critic that all agents share",
    True: "give the model that the critics start from, critics with one for each agent, or set "
    "args.use_separate_critic=false",
}


def _tokenizers_of(problems: Problems, num_agents: int, agents: list[Any], tokenizer: Any) -> list[Any]:
    if isinstance(tokenizer, list | tuple):
        if len(tokenizer) != num_agents:
            problems.add("tokenizer", _count("tokenizer", len(tokenizer), num_agents, "one for all"))
        return list(tokenizer)
    if tokenizer is not None:
        return [tokenizer] * num_agents
    found = [agent if isinstance(agent, str | Path) else None for agent in agents]
    if any(own is None and agent is not None for own, agent in zip(found, agents, strict=True)):
        problems.add(
            "tokenizer", "missing; agents given as model objects need one, or a list with one for each"
        )
    return found


def _count(what: str, given: int, wanted: int, otherwise: str) -> str:
    return f"{given} {what}s given where {wanted} are needed; give {wanted}, or {otherwise}"
