"""Builds the rollout collector of a run from its configuration and its functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from actors.prompts import PromptBuilder
from actors.rewards import RewardFunction
from actors.rollout import RolloutCollector
from actors.transitions import Transition
from services.config import RunConfig

Function = Callable[..., Any]


def collector_of(
    config: RunConfig,
    *,
    num_generations: int,
    reward_func: Function,
    reward_processor: Function | None,
    formatters: Sequence[Function | None],
    external_transition: Function | None,
) -> RolloutCollector:
    """A collector with the run's turns, limits and seed; evaluation takes one generation, training the configured."""
    args, limit = config.args, config.reward_timeout_s
    return RolloutCollector(
        num_agents=args.num_agents,
        num_turns=args.num_turns,
        num_generations=num_generations,
        early_termination_threshold=args.early_termination_threshold,
        prompts=PromptBuilder(formatters, args.num_agents, passthrough=args.external_prompt_passthrough),
        reward=RewardFunction(reward_func, reward_processor, num_agents=args.num_agents, timeout_s=limit),
        transition=None
        if external_transition is None
        else Transition(external_transition, num_agents=args.num_agents, timeout_s=limit),
        seed=config.seed,
    )
