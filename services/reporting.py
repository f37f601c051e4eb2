"""From an update round to metrics: names, means and rates.  Logs nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from actors.generation_group import GenerationStats
from services.learner_group import AgentRound, RoundResult


def round_report(
    result: RoundResult,
    reference_kl_coef: float | None,
    stats: GenerationStats,
    seconds: Mapping[str, float],
    probe_gap: float,
) -> dict[str, float]:
    """All metrics of one update round.

    Args:
        reference_kl_coef: None without a reference penalty.
        seconds: part of the round -> seconds spent in it.
        probe_gap: largest difference of a log-probability seen when the weights were pushed.
    """
    report = turn_metrics(result.agents, reference_kl_coef)
    report |= _completion_metrics(result.agents)
    report |= _critic_metrics(result.agents)
    report |= _learner_metrics(result.agents)
    report["push_gap_max"] = probe_gap
    report["tokens_per_second"] = stats.tokens / stats.seconds if stats.seconds > 0 else 0.0
    report |= {f"seconds/{part}": value for part, value in seconds.items()}
    return report


def staleness(agents: list[AgentRound], update_round: int) -> dict[str, float]:
    """How many updates older than the policy that update `update_round` (counted from 1) began with are the weights
    that its samples come from."""
    versions = np.array([sample.completion.weight_version for own in agents for sample in own.samples])
    behind = update_round - 1 - versions
    return {"staleness_mean": float(behind.mean()), "staleness_max": float(behind.max())}


def turn_metrics(agents: list[AgentRound], reference_kl_coef: float | None) -> dict[str, float]:
    """`turn_k/reward_mean`, `turn_k/expected_return` and the reference penalty, over a turn's samples."""
    samples = [sample for own in agents for sample in own.samples]
    columns = {
        "reward_mean": np.array([s.reward for s in samples]),
        "expected_return": np.array([s.expected_return for s in samples]),
    }
    divergences = [own.reference_kl for own in agents if own.reference_kl is not None]
    if divergences and reference_kl_coef is not None:
        kl = np.concatenate(divergences).astype(np.float64)
        columns |= {"reference_kl_mean": kl, "reference_kl_penalty_mean": reference_kl_coef * kl}
    turns = np.array([s.turn_idx for s in samples])
    return {
        f"turn_{turn + 1}/{name}": float(column[turns == turn].mean())
        for turn in np.unique(turns)
        for name, column in columns.items()
    }


def _completion_metrics(agents: list[AgentRound]) -> dict[str, float]:
    report: dict[str, float] = {}
    everything = []
    for index, own in enumerate(agents):
        completions = [sample.completion for sample in own.samples]
        everything += completions
        report[f"agent_{index}/completion_tokens_mean"] = float(
            np.mean([len(c.token_ids) for c in completions])
        )
    cut = np.mean([c.finish_reason == "length" for c in everything])
    return report | {
        "completion_tokens_mean": float(np.mean([len(c.token_ids) for c in everything])),
        "truncation_rate": float(cut),
        "eos_rate": float(1 - cut),
        "count/prompts_truncated": float(sum(c.prompt_truncated for c in everything)),
        "weight_version": float(np.mean([c.weight_version for c in everything])),
    }


def _critic_metrics(agents: list[AgentRound]) -> dict[str, float]:
    targets = np.concatenate([own.td_targets for own in agents]).astype(np.float64)
    errors = np.concatenate([own.td_errors for own in agents]).astype(np.float64)
    spread = targets.var()
    return {
        "value_mean": float(np.mean(np.concatenate([own.values for own in agents]))),
        "td_error_mean": float(errors.mean()),
        "td_error_std": float(errors.std()),
        # 1: the critic foresees every target; 0: no better than their mean.  Equal targets have nothing to explain.
        "value_explained_variance": float(1 - errors.var() / spread) if spread > 1e-12 else 0.0,
    }


def _learner_metrics(agents: list[AgentRound]) -> dict[str, float]:
    report: dict[str, float] = {}
    gathered: dict[str, list[float]] = defaultdict(list)
    for index, own in enumerate(agents):
        for name, value in own.metrics.items():
            report[f"agent_{index}/{name}"] = value
            gathered[name].append(value)
    for name, numbers in gathered.items():
        report[name] = max(numbers) if name.endswith("_max") else float(np.mean(numbers))
    return report
