"""From a configuration to what every actor of a SMARL run is made of; checks all that can be checked before a start.

Makes the environment once, to learn its sizes, and throws it away.  Starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.environments.hooks import Hooks
from actors.environments.registry import is_reference
from actors.environments.team import CommonSpace, TeamEnvironmentError, TeamSpace
from actors.smarl.chunk import mean_reward
from actors.smarl.coordinator import CoordinatorSpec, TargetSpec
from actors.smarl.runner import EnvironmentSpec, PointerSpec, RunnerSpec
from actors.smarl.worker import WorkerSpec
from learners.smarl.common_action import Exploration
from learners.smarl.ddpg import DDPGRules, Networks
from services.callables import resolve
from services.config import EnvironmentConfig, SMARLConfig, SMARLRunConfig
from services.config.base import Problems

_HOOKS = ("individual_observation", "universal_observation", "compose_action", "target_mask")


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What the actors of a run are made of."""

    space: TeamSpace
    worker: WorkerSpec
    coordinator: CoordinatorSpec
    runner: RunnerSpec


def draw(config: SMARLRunConfig) -> Blueprint:
    """The blueprint of `config`.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    problems = Problems()
    environment = _environment(config.environment, problems)
    sequence_reward = mean_reward
    if config.sequence_reward is not None:
        found = problems.collect("sequence_reward", resolve, config.sequence_reward)
        sequence_reward = found if found is not None else mean_reward
    problems.refuse()
    assert environment is not None
    space = _space(config, environment, problems)
    problems.refuse()
    assert space is not None
    args = config.args
    networks = Networks.of(space.individual_size, space.common, tuple(args.hidden_sizes))
    pointer = (
        PointerSpec(space.universal_size, args.target_hidden_size, args.target_attention)
        if space.has_targets
        else None
    )
    return Blueprint(
        space,
        _worker(config, networks),
        _coordinator(config, networks, pointer),
        RunnerSpec(
            environment=environment,
            networks=networks,
            max_steps=args.max_episode_steps,
            seed=config.seed,
            common_policy=args.common_policy,
            target_policy=args.target_policy,
            pointer=pointer,
            target_temperature=args.target_temperature,
            sequence_reward=sequence_reward,
        ),
    )


def exploration_at(args: SMARLConfig, episode: int) -> Exploration:
    """How much to explore in `episode`: linear decay, then constant."""
    span = args.exploration_decay_episodes or max(1, args.num_episodes // 2)
    done = min(1.0, episode / span)

    def between(start: float, end: float) -> float:
        return start + (end - start) * done

    return Exploration(
        noise=between(args.exploration_noise, args.exploration_noise_end),
        epsilon=between(args.exploration_epsilon, args.exploration_epsilon_end),
        temperature=args.exploration_temperature,
    )


def _environment(config: EnvironmentConfig, problems: Problems) -> EnvironmentSpec | None:
    source: Any = config.name
    if is_reference(config.name):
        source = problems.collect("environment.name", resolve, config.name)
    functions = {
        name: problems.collect(f"environment.{name}", resolve, reference)
        for name in _HOOKS
        if (reference := getattr(config, name)) is not None
    }
    common: CommonSpace | None = None
    if config.common_space is not None:
        make = problems.collect("environment.common_space", resolve, config.common_space)
        common = None if make is None else _common_space(make, problems)
    if problems.found:
        return None
    hooks = None
    if functions or common is not None or not config.targets_are_agents:
        hooks = Hooks(**functions, common_space=common, targets_are_agents=config.targets_are_agents)
    return EnvironmentSpec(source, config.options, hooks)


def _common_space(make: Callable[..., Any], problems: Problems) -> CommonSpace | None:
    try:
        space = make()
    except Exception as error:
        problems.add("environment.common_space", f"raised {type(error).__name__}: {error}")
        return None
    if not isinstance(space, CommonSpace):
        problems.add("environment.common_space", f"returned {space!r}; it must return a CommonSpace")
        return None
    return space


def _space(config: SMARLRunConfig, environment: EnvironmentSpec, problems: Problems) -> TeamSpace | None:
    """The environment's sizes, which every number of agents in the schedule must share."""
    spaces: dict[int, TeamSpace] = {}
    for count in sorted(set(config.schedule.values())):
        try:
            made = environment.make(count, 1)
            made.reset([0])
            made.close()
        except (ValueError, TypeError, TeamEnvironmentError) as error:
            problems.add(
                "environment" if len(config.schedule) == 1 else f"environment with {count} agents", str(error)
            )
            continue
        except Exception as error:  # the environment is the user's code
            problems.add(
                "environment", f"making it for {count} agents raised {type(error).__name__}: {error}"
            )
            continue
        spaces[count] = made.space
        if made.space.has_targets and count < 2:
            problems.add(
                "agents", f"{count} agent has nobody to aim at; a target network needs at least 2 agents"
            )
    if len(set(spaces.values())) > 1:
        told = "; ".join(f"{count}: {space}" for count, space in spaces.items())
        problems.add(
            "environment", f"its sizes depend on the number of agents, which SMARL cannot serve: {told}"
        )
    return next(iter(spaces.values()), None)


def _worker(config: SMARLRunConfig, networks: Networks) -> WorkerSpec:
    args = config.args

    def rate(own: float | None) -> float:
        return args.learning_rate if own is None else own

    return WorkerSpec(
        networks=networks,
        rules=DDPGRules(
            args.discount,
            rate(args.actor_learning_rate),
            rate(args.critic_learning_rate),
            args.relaxation_temperature,
        ),
        tau=args.tau,
        batch_size=args.batch_size,
        learning_starts=args.learning_starts or args.batch_size,
        target_sync_interval=args.target_sync_interval or args.sync_interval,
        replay_capacity=args.replay_capacity,
        shared_replay=args.replay == "shared",
        seed=config.seed,
    )


def _coordinator(config: SMARLRunConfig, networks: Networks, pointer: PointerSpec | None) -> CoordinatorSpec:
    args = config.args
    target = None
    if pointer is not None:
        own = args.target_learning_rate
        target = TargetSpec(
            pointer,
            args.learning_rate if own is None else own,
            args.target_epochs,
            args.target_batch_size,
            args.memory_capacity,
            args.memory_resolution,
        )
    return CoordinatorSpec(
        networks, args.tau, args.central_init, args.sync_order == "agent", config.seed, target
    )
