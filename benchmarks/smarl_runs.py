"""Trains a configuration of SMARL for several seeds and tells what its agents earn at the end; tables of such numbers.

What the SMARL benchmarks share.  Owns Ray's start and the folder the runs write to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import ray

from services import SMARLTrainer
from services.config import SMARLRunConfig, load_config

EXAMPLES = Path(__file__).parents[1] / "examples"


@contextmanager
def local_ray() -> Iterator[None]:
    """One Ray on this machine, whose logical CPUs are enough for a run however few cores there are."""
    ray.init("local", num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def trained_return(config: Path, overrides: Sequence[str], seed: int, eval_episodes: int) -> float:
    """Mean team return without exploration after a training run, which leaves nothing behind."""
    with TemporaryDirectory() as folder:
        own = [f"output_dir={folder}", f"seed={seed}", "checkpoint_interval=0", "args.eval_interval=0"]
        loaded = load_config(config, [*overrides, *own])
        assert isinstance(loaded, SMARLRunConfig)
        with SMARLTrainer.from_config(loaded) as trainer:
            trainer.train()
            return trainer.evaluate(episodes=eval_episodes)["team_return_mean"]


def measure(
    config: Path, variants: Mapping[str, Sequence[str]], seeds: Sequence[int], eval_episodes: int
) -> dict[str, list[float]]:
    """The final team return of every variant, given by its overrides, for every seed."""
    returns: dict[str, list[float]] = {}
    for name, overrides in variants.items():
        started = time.perf_counter()
        returns[name] = [trained_return(config, overrides, seed, eval_episodes) for seed in seeds]
        report(name, returns[name], started)
    return returns


def report(name: str, values: Sequence[float], started: float) -> None:
    """Tell what has just been measured; a table comes at the end."""
    told = ", ".join(f"{value:.1f}" for value in values)
    print(f"{name}: {told} ({time.perf_counter() - started:.0f} s)", flush=True)


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds; of a single seed there is no deviation to tell."""
    mean = float(np.mean(values))
    return f"{mean:.1f} ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else f"{mean:.1f}"
