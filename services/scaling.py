"""`greenroom scale`: how many generation workers each agent of a running language-model run has.

Owns the desk at which the wish is left.  When it is granted is the training loop's business, and how, the system's.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from services.config.base import ConfigError
from services.remote_control import NAMESPACE, actor_of
from services.run_folder import RunFolder

logger = logging.getLogger(__name__)

_WORKERS = "workers_per_agent"
_ANSWER_S = 30.0


class ScalingDesk:
    """The driver's side: opened when a run trains, closed when it ends."""

    def __init__(self, run: RunFolder) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from actors.control_desk import ControlDesk

        here = ray.get_runtime_context().get_node_id()
        self._desk: Any = (
            ray.remote(ControlDesk)
            .options(
                name=_name(run),
                namespace=NAMESPACE,
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    here, soft=False
                ),  # lives as long as the driver
            )
            .remote()
        )

    def wanted(self) -> int | None:
        """How many workers per agent have been asked for since the last call; None: nobody asked."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        try:
            wishes: dict[str, int] = ray.get(self._desk.take.remote(), timeout=_ANSWER_S)
        except (RayActorError, GetTimeoutError) as error:
            logger.warning("`greenroom scale` is out of service, the run goes on: %s", error)
            return None
        return wishes.get(_WORKERS)

    def close(self) -> None:
        import ray

        ray.kill(self._desk, no_restart=True)


def ask_for_workers(run_dir: str | Path, count: int, *, address: str | None) -> None:
    """Ask a running service for `count` generation workers per agent from its next update round on.

    Raises:
        ConfigError: no such run of language models is running.
    """
    run = RunFolder.open(run_dir)
    from services.config import RunConfig, load_config

    if not isinstance(load_config(run.config_file), RunConfig):
        raise ConfigError(
            f"{run.path.name} is no run of language models; `greenroom agents` changes a SMARL team"
        )
    desk = actor_of(run, _name(run), address=address)
    from services.waiting import fetch

    fetch([desk.ask.remote(_WORKERS, count)], "the run's desk", _ANSWER_S, "Is the run alive?")


def _name(run: RunFolder) -> str:
    # The whole path: runs of one name in different folders may share a cluster.
    return f"control-{run.path}"
