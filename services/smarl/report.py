"""From a round of episodes to metrics: names, means and rates.  Logs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from actors.smarl.chunk import Progress


@dataclass(frozen=True, slots=True)
class Round:
    """What a round of episodes measured."""

    episodes: int
    num_agents: int
    progress: Sequence[Progress]
    """Where each runner's episodes ended."""
    learned: Mapping[str, Sequence[np.ndarray]]
    """Metric -> arrays [updates, N], NaN where an agent took no step."""
    distances: Sequence[np.ndarray]
    """Distances of the agents to the centre [N], at each soft update."""
    seconds: Mapping[str, float]
    env_steps: int


def round_metrics(played: Round) -> dict[str, float]:
    """Metrics of one round.

    `return_mean` is per agent and episode, `team_return_mean` the sum over agents, both undiscounted.
    """
    returns = np.concatenate([p.returns for p in played.progress])[: played.episodes]
    lengths = np.concatenate([p.lengths for p in played.progress])[: played.episodes]
    metrics = {
        "num_agents": float(played.num_agents),
        "return_mean": float(returns.mean()),
        "team_return_mean": float(returns.sum(1).mean()),
        "episode_length_mean": float(lengths.mean()),
    }
    metrics |= {f"agent_{n}/return_mean": float(own) for n, own in enumerate(returns.mean(0))}
    updates = 0
    for name, arrays in played.learned.items():
        values = np.concatenate(list(arrays))
        updates = len(values)
        if updates:
            metrics[name] = float(np.nanmean(values))
            metrics |= {f"agent_{n}/{name}": float(v) for n, v in enumerate(_means(values)) if np.isfinite(v)}
    if played.distances:
        distances = np.mean(np.stack(list(played.distances)), 0)
        metrics["centre_distance_mean"] = float(distances.mean())
        metrics |= {f"agent_{n}/centre_distance": float(d) for n, d in enumerate(distances)}
    seconds = played.seconds["round"]
    metrics["env_steps_per_second"] = played.env_steps / seconds
    metrics["updates_per_second"] = updates * played.num_agents / seconds
    return metrics | {f"seconds/{part}": value for part, value in played.seconds.items()}


def _means(values: np.ndarray) -> np.ndarray:
    """Column means of [updates, N]; NaN for an agent that took no step at all."""
    taken = np.isfinite(values)
    means: np.ndarray = np.where(taken, values, 0).sum(0) / np.where(taken.any(0), taken.sum(0), np.nan)
    return means
