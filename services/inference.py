"""Trained agents at work: samples and evaluations from a run folder, with engines alone and no learners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.generation_group import GenerationGroup
from services.callables import resolve
from services.checkpoint import CheckpointStore
from services.composition import formatters_of
from services.config import CommonRun, ConfigError, RunConfig, load_config
from services.data import load_rows
from services.evaluation import Evaluator
from services.launch import engines_alone, sampling_of
from services.rollouts import collector_of
from services.room import Sources
from services.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled completion."""

    agent_idx: int
    prompt_idx: int
    sample_idx: int
    text: str


def generate_from_run(
    run_dir: str | Path,
    prompts: Sequence[str],
    *,
    agent: int | None = None,
    samples: int = 1,
    greedy: bool = False,
    seed: int = 0,
    checkpoint: str | None = None,
) -> list[Answer]:
    """Completions of `prompts` by the run's agents, `samples` of each.

    Raises:
        ConfigError: the run has no such checkpoint or agent.
    """
    run = RunFolder.open(run_dir)
    config = _language_run(load_config(run.config_file))
    count = config.args.num_agents
    if agent is not None and agent >= count:
        raise ConfigError(f"--agent: {agent} does not exist; the run has agents 0 to {count - 1}")
    wanted = range(count) if agent is None else [agent]
    sampling = sampling_of(config.args)
    texts = [prompt for prompt in prompts for _ in range(samples)]
    seeds = np.random.default_rng([seed, len(texts)]).integers(2**62, size=(count, len(texts))).tolist()
    with _engines(run, config, checkpoint) as generation:
        each = [texts if index in wanted else [] for index in range(count)]
        own_seeds = [seeds[index] if index in wanted else [] for index in range(count)]
        completions = generation.generate(each, own_seeds, sampling.greedy() if greedy else sampling)
    return [
        Answer(index, k // samples, k % samples, completion.text)
        for index in wanted
        for k, completion in enumerate(completions[index])
    ]


def evaluate_run(
    run_dir: str | Path,
    overrides: Sequence[str] = (),
    *,
    dataset: str | None = None,
    num_samples: int | None = None,
    checkpoint: str | None = None,
) -> dict[str, float]:
    """Mean rewards of the run's agents on `dataset` (default: the run's evaluation set, else its training set)."""
    run = RunFolder.open(run_dir)
    config = _language_run(load_config(run.config_file, overrides))
    rows = load_rows(dataset or config.eval_dataset or config.train_dataset)
    sampling = sampling_of(config.args)
    with _engines(run, config, checkpoint) as generation:
        evaluator = Evaluator(
            collector_of(
                config,
                num_generations=1,
                reward_func=resolve(config.reward_func),
                reward_processor=_resolved(config.reward_processor),
                formatters=formatters_of(config.args.num_agents, config.formatters),
                external_transition=_resolved(config.external_transition),
            ),
            rows,
            num_samples=num_samples or len(rows),
            batch_size=max(config.args.eval_batch_size, 64),
            generate=lambda prompts, seeds: generation.generate(
                prompts, seeds, sampling.greedy() if config.eval_greedy else sampling
            ),
            metrics_callback=_resolved(config.metrics_callback),
        )
        return evaluator.run(0, 0)


def _language_run(config: CommonRun) -> RunConfig:
    if not isinstance(config, RunConfig):
        raise ConfigError("this is no run of language models; `greenroom evaluate` plays its episodes")
    return config


def _resolved(reference: str | None) -> Callable[..., Any] | None:
    return None if reference is None else resolve(reference)


@contextmanager
def _engines(run: RunFolder, config: RunConfig, checkpoint: str | None) -> Iterator[GenerationGroup]:
    folder = _models_folder(run, checkpoint)
    single = not (folder / "agent_0").is_dir()
    agents = [str(folder) if single else str(folder / f"agent_{i}") for i in range(config.args.num_agents)]
    with engines_alone(config, Sources(agents, agents, [], [])) as generation:
        yield generation


def _models_folder(run: RunFolder, checkpoint: str | None) -> Path:
    """`final/` where the run has ended, else its newest checkpoint; or the one that was named."""
    if checkpoint is not None:
        folder = run.final if checkpoint == "final" else run.checkpoints / checkpoint
        if not folder.is_dir():
            known = [path.name for path in sorted(run.checkpoints.glob("step_*"))]
            raise ConfigError(
                f"--checkpoint: {folder} does not exist; there are: {', '.join(known) or 'none'}"
            )
        return folder
    newest = run.final if run.final.is_dir() else CheckpointStore(run.checkpoints, None).latest()
    if newest is None:
        raise ConfigError(f"{run.path} holds no trained models yet: neither final/ nor a complete checkpoint")
    return newest
