"""What the command line does with a SMARL run: evaluate a finished one, change the team of a running one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ray

from services.checkpoint import CheckpointStore
from services.config import ConfigError, SMARLRunConfig
from services.run_folder import RunFolder
from services.smarl.keeper import NAMESPACE
from services.smarl.trainer import SMARLTrainer, coordinator_name
from services.waiting import fetch


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


def change_team(run_dir: str | Path, *, add: int, remove: Sequence[int], address: str | None) -> int:
    """Ask a running service for a change of its team before its next episode; returns how many agents there will be.

    Args:
        address: of the Ray cluster that the run is on; default: RAY_ADDRESS, or the one on this machine.

    Raises:
        ConfigError: no such run is running there, or the change cannot be made.
    """
    run = RunFolder.open(run_dir)
    try:
        if not ray.is_initialized():
            ray.init(
                address=address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR"
            )
        coordinator = ray.get_actor(coordinator_name(run.path.name), namespace=NAMESPACE)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"{run.path.name} is not running on the Ray cluster at {address or 'this machine'}: {error}"
        ) from None
    try:
        answer = fetch(
            [coordinator.request.remote(add, list(remove))], "the coordinator", 60, "Is the run alive?"
        )
    except ValueError as error:
        raise ConfigError(str(error).strip().splitlines()[-1]) from None
    return int(answer[0])
