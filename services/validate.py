"""Checks a run as a whole before a model is loaded or an actor started, and lists everything that is wrong.

The same checks serve config files, whose models and functions are names, and the Python trainers, whose models and
functions may be objects. This module loads no weights and starts nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services import model_checks
from services.callables import resolve
from services.composition import Function, Models, find_models, formatters_of, transition_problems
from services.config.algorithm import ActorCriticConfig
from services.config.base import Problems
from services.config.common import CommonRun
from services.config.models import EngineConfig, LoraConfig, ModelOptions
from services.config.run import DataConfig, RunConfig
from services.config.smarl import SMARLRunConfig
from services.data import Rows, check_prompts, load_rows


@dataclass(frozen=True)
class CheckedRun:
    """The parts of a run that passed all checks."""

    models: Models
    tokenizers: list[Any]
    """Loaded, with a pad token, one for each agent; agents with the same source share one."""
    reward_func: Function
    reward_processor: Function | None
    formatters: list[Function | None]
    """One for each agent."""
    external_transition: Function | None
    metrics_callback: Function | None
    train_rows: Rows
    eval_rows: Rows | None


def validate(config: RunConfig) -> CheckedRun:
    """Checks everything that a config file names. Raises ConfigError, which lists all problems."""
    return check_run(
        config.args,
        agent_model=config.agent_model,
        agents=config.agents,
        critic_model=config.critic_model,
        critics=config.critics,
        tokenizer=config.tokenizer,
        reward_func=config.reward_func,
        reward_processor=config.reward_processor,
        formatters=config.formatters,
        external_transition=config.external_transition,
        metrics_callback=config.metrics_callback,
        train_dataset=config.train_dataset,
        eval_dataset=config.eval_dataset,
        model_options=config.model_options,
        engine=config.engine,
        lora=config.lora,
    )


def describe(config: CommonRun) -> str:
    """Checks everything that a config file names, and says what was found.

    Raises:
        ConfigError: lists all problems.
    """
    if isinstance(config, SMARLRunConfig):
        from services.smarl.blueprint import draw

        space = draw(config).space
        kind = "choices" if space.common.discrete else "dimensions"
        individual = "with" if space.has_targets else "without"
        return (
            f"{'/'.join(str(n) for n in config.schedule.values())} agents in {config.environment.name}, "
            f"observations of {space.individual_size} (individual) and {space.universal_size} (universal) numbers, "
            f"common actions of {space.common.size} {kind}, {individual} individual actions"
        )
    assert isinstance(config, RunConfig)
    checked = validate(config)
    return f"{len(checked.train_rows)} training rows, {len(checked.models.agents)} agents"


def check_run(
    args: ActorCriticConfig,
    *,
    reward_func: str | Function | None,
    train_dataset: DataConfig | str | Rows | None,
    agent_model: Any = None,
    agents: Sequence[Any] | None = None,
    critic_model: Any = None,
    critics: Sequence[Any] | None = None,
    tokenizer: Any = None,
    reward_processor: str | Function | None = None,
    formatters: Any = None,
    external_transition: str | Function | None = None,
    metrics_callback: str | Function | None = None,
    eval_dataset: DataConfig | str | Rows | None = None,
    model_options: ModelOptions | None = None,
    engine: EngineConfig | None = None,
    lora: LoraConfig | None = None,
) -> CheckedRun:
    """Checks the arguments of a trainer, names or objects, against each other and against what they point at.

    Raises ConfigError, which lists all problems, each under the argument that has to change.
    """
    models, found = find_models(args, agent_model, agents, critic_model, critics, tokenizer)
    problems = Problems(found)
    keys = _keys_of(models, agents, critics, tokenizer)
    tokenizers = _check_models(
        problems,
        args,
        models,
        keys,
        model_options or ModelOptions(),
        engine or EngineConfig(),
        lora,
    )
    if reward_func is None:
        problems.add("reward_func", "missing; give the function that scores the agents' joint answer")
    functions = {
        name: problems.collect(name, resolve, reference) if reference is not None else None
        for name, reference in {
            "reward_func": reward_func,
            "reward_processor": reward_processor,
            "external_transition": external_transition,
            "metrics_callback": metrics_callback,
        }.items()
    }
    resolved_formatters = problems.collect("", formatters_of, args.num_agents, formatters)
    problems.found += transition_problems(args, external_transition)
    need_prompt = resolved_formatters is not None and None in resolved_formatters
    train_rows = _check_rows(problems, "train_dataset", train_dataset, need_prompt)
    eval_rows = (
        _check_rows(problems, "eval_dataset", eval_dataset, need_prompt) if eval_dataset is not None else None
    )
    problems.refuse()
    assert resolved_formatters is not None
    assert functions["reward_func"] is not None
    assert train_rows is not None
    return CheckedRun(
        models,
        tokenizers,
        functions["reward_func"],
        functions["reward_processor"],
        resolved_formatters,
        functions["external_transition"],
        functions["metrics_callback"],
        train_rows,
        eval_rows,
    )


def _check_rows(problems: Problems, key: str, source: Any, need_prompt: bool) -> Rows | None:
    if source is None:
        problems.add(key, "missing; give the rows to train on")
        return None
    rows = problems.collect(key, load_rows, source)
    if rows is not None and need_prompt:
        problems.collect(key, check_prompts, rows)
    return rows


def _check_models(
    problems: Problems,
    args: ActorCriticConfig,
    models: Models,
    keys: Models,
    options: ModelOptions,
    engine: EngineConfig,
    lora: LoraConfig | None,
) -> list[Any]:
    """Checks all models and tokenizers; returns the tokenizers. `keys` holds what each is called in a message."""
    trust = options.trust_remote_code
    tokenizers: list[Any] = []
    known: dict[Any, Any] = {}
    for source, key in zip(models.tokenizers, keys.tokenizers, strict=True):
        name = str(source) if isinstance(source, str | Path) else id(source)
        if name not in known:
            known[name] = (
                None if source is None else problems.collect(key, model_checks.read_tokenizer, source, trust)
            )
        tokenizers.append(known[name])
    if engine.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        problems.add(
            "engine.backend",
            "'vllm' is not installed: install the extra `cpu` or `cuda`, or set engine.backend=transformers",
        )
    for agent, (source, key) in enumerate(zip(models.agents, keys.agents, strict=True)):
        config = (
            None if source is None else problems.collect(key, model_checks.read_model_config, source, trust)
        )
        if config is None:
            continue
        problems.add(key, _of(source, model_checks.causal_problem(config)))
        problems.add(key, _of(source, _vocabulary_problem(models, tokenizers, agent, config)))
        if engine.backend == "vllm" and not _on_gpu(args.agent_devices, agent):
            problems.add(key, _of(source, model_checks.head_size_problem(config)))
        _check_context(problems, args, engine, config, f"{key} ({_shown(source)})")
        problem = model_checks.tensor_parallel_problem(config, engine.tensor_parallel_size)
        problems.add("engine.tensor_parallel_size", _of(source, problem))
        targets = None if lora is None else lora.target_modules
        if targets is not None and model_checks.causal_problem(config) is None:
            problem = model_checks.adapter_problem(config, targets, trust)
            problems.add("lora.target_modules", _of(source, problem))
    for critic, (source, key) in enumerate(zip(models.critics, keys.critics, strict=True)):
        config = (
            None if source is None else problems.collect(key, model_checks.read_model_config, source, trust)
        )
        if config is not None:
            # The one critic of MAAC reads with the first agent's tokenizer.
            problems.add(key, _of(source, _vocabulary_problem(models, tokenizers, critic, config)))
    return tokenizers


def _vocabulary_problem(models: Models, tokenizers: list[Any], agent: int, config: Any) -> str | None:
    """Why a model of `config` cannot read the tokens of `agent`, or None; None too if there is no such tokenizer."""
    if agent >= len(tokenizers) or tokenizers[agent] is None:
        return None
    problem = model_checks.vocabulary_problem(tokenizers[agent], config)
    return problem and (
        f"{problem}, and it reads with the tokenizer of {_shown(models.tokenizers[agent])}; give a model that fits "
        "this tokenizer"
    )


def _check_context(
    problems: Problems, args: ActorCriticConfig, engine: EngineConfig, config: Any, named: str
) -> None:
    longest = model_checks.context_length(config)
    asked = engine.max_model_len
    if asked is not None and longest is not None and asked > longest:
        problems.add("engine.max_model_len", f"{asked} exceeds the {longest} tokens that {named} takes")
    room = min((length for length in (longest, asked) if length is not None), default=None)
    if room is not None and args.max_new_tokens >= room:
        problems.add(
            "args.max_new_tokens",
            f"{args.max_new_tokens} leaves no room for a prompt: {named} takes {room} tokens in all",
        )


def _of(source: Any, problem: str | None) -> str | None:
    return problem and f"{_shown(source)}: {problem}"


def _on_gpu(devices: str | list[str] | None, agent: int) -> bool:
    if isinstance(devices, list):
        return agent < len(devices) and devices[agent] != "cpu"
    if devices is not None:
        return devices != "cpu"
    import torch

    return torch.cuda.is_available()


def _shown(source: Any) -> str:
    return repr(str(source)) if isinstance(source, str | Path) else f"the given {type(source).__name__}"


def _keys_of(models: Models, agents: Any, critics: Any, tokenizer: Any) -> Models:
    """What the parts of `models` are called in messages: the argument that they came from."""
    agent_keys = [f"agents[{i}]" if agents is not None else "agent_model" for i in range(len(models.agents))]
    critic_keys = [
        f"critics[{i}]" if critics is not None else "critic_model" for i in range(len(models.critics))
    ]
    if tokenizer is None:
        return Models(agent_keys, critic_keys, agent_keys)
    several = isinstance(tokenizer, list | tuple)
    return Models(
        agent_keys,
        critic_keys,
        [f"tokenizer[{i}]" if several else "tokenizer" for i in range(len(models.tokenizers))],
    )
