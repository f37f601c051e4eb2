"""Changes the team of a SMARL run that another process trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.config.base import ConfigError
from services.remote_control import actor_of
from services.run_folder import RunFolder


def coordinator_name(run: str) -> str:
    """Under which name the coordinator of a run is found, from the name of its folder."""
    return f"coordinator-{run}"


def change_team(run_dir: str | Path, *, add: int, remove: Sequence[int], address: str | None) -> int:
    """Ask a running service for a change of its team before its next episode; returns how many agents there will be.

    Args:
        address: of the Ray cluster that the run is on; default: the one it was started on.

    Raises:
        ConfigError: no such run is running there, or the change cannot be made.
    """
    run = RunFolder.open(run_dir)
    coordinator = actor_of(run, coordinator_name(run.path.name), address=address)
    from services.waiting import fetch  # imports Ray

    try:
        answer = fetch(
            [coordinator.request.remote(add, list(remove))], "the coordinator", 60, "Is the run alive?"
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return int(answer[0])
