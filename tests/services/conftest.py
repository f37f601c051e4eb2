"""Trainers for tests of whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from callbacks_for_training import letters
from language_runs import FAST, ROWS, TRANSFORMERS

from services import IACConfig, IACTrainer, MAACConfig, MAACTrainer
from services.trainer import ActorCriticTrainer


@pytest.fixture
def make(tmp_path: Path, small_model: Path) -> Iterator[Any]:
    """Builds trainers that are shut down at the end of the test."""
    trainers: list[ActorCriticTrainer] = []

    def build(algorithm: str, args: dict[str, Any], **options: Any) -> ActorCriticTrainer:
        cls, config = {"maac": (MAACTrainer, MAACConfig), "iac": (IACTrainer, IACConfig)}[algorithm]
        values: dict[str, Any] = {
            "agent_model": str(small_model),
            "reward_func": letters,
            "train_dataset": ROWS,
            "engine": TRANSFORMERS,
            "output_dir": str(tmp_path),
            "placement": {"cpus_per_generation_worker": 0.1, "cpus_per_learner": 0.1},
            "checkpoint_interval": 0,
        }
        if args.get("use_separate_critic", True):
            values["critic_model"] = str(small_model)
        trainer = cls(args=config(**{**FAST, **args}), **{**values, **options})
        trainers.append(trainer)
        return trainer

    yield build
    for trainer in trainers:
        trainer.shutdown()
