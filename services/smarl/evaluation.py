"""Evaluates a SMARL run from its folder."""

from __future__ import annotations

from pathlib import Path

from services.checkpoint import CheckpointStore
from services.config import ConfigError, SMARLRunConfig
from services.run_folder import RunFolder
from services.smarl.trainer import SMARLTrainer


def evaluate_team(
    run_dir: str | Path,
    config: SMARLRunConfig,
    *,
    num_agents: int | None,
    episodes: int | None,
    checkpoint: str | None,
) -> dict[str, float]:
    """Returns of a run's agents, or of `num_agents` agents with the central actor, without exploration.

    Raises:
        ConfigError: the run has no such checkpoint.
    """
    run = RunFolder.open(run_dir)
    folder = (
        CheckpointStore(run.checkpoints, None).latest()
        if checkpoint is None
        else run.checkpoints / checkpoint
    )
    if folder is None or not folder.is_dir():
        known = ", ".join(path.name for path in sorted(run.checkpoints.glob("step_*"))) or "none"
        raise ConfigError(f"--checkpoint: {folder or 'a complete one'} does not exist; there are: {known}")
    with SMARLTrainer.from_config(config) as trainer:
        return trainer.evaluate(num_agents=num_agents, episodes=episodes, checkpoint=folder)
