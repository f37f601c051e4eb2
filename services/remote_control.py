"""Finds a run that another process trains: where its cluster is, and how its named actors are reached.

Ray is imported late: how to authenticate with a cluster is read from the environment when it is.
"""

from __future__ import annotations

import json
import os
from typing import Any

from services.config.base import ConfigError
from services.ray_connection import knock
from services.run_folder import RunFolder

NAMESPACE = "greenroom"
"""Of all named actors."""


def leave_address(run: RunFolder) -> None:
    """Write down, in the process that trains, where others find its cluster."""
    import ray

    where = {
        "address": ray.get_runtime_context().gcs_address,
        "auth_mode": os.environ.get("RAY_AUTH_MODE"),
    }
    run.cluster_file.write_text(json.dumps(where) + "\n")


def actor_of(run: RunFolder, name: str, *, address: str | None) -> Any:
    """The handle of actor `name` of a running service; connects with its cluster.

    Args:
        address: of the Ray cluster that the run is on; default: the one it was started on.

    Raises:
        ConfigError: no such run is running there.
    """
    if address is None and run.cluster_file.is_file():
        where = json.loads(run.cluster_file.read_text())
        address = where["address"]
        if where["auth_mode"]:
            os.environ.setdefault("RAY_AUTH_MODE", where["auth_mode"])
    import ray

    try:
        if address:
            knock(address)
        if not ray.is_initialized():
            ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
        return ray.get_actor(name, namespace=NAMESPACE)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{run.path.name} is not running on the Ray cluster at {address or 'this machine'} ({_reason(error)})"
        ) from None


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
