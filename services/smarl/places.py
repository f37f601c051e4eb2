"""Where the actors of a SMARL run go: bundles for the most agents of the schedule, and the Ray options of each actor.

Actors beyond that, of agents whom nobody foresaw, go where the cluster has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.bundles import Resources, asked, bundle_of
from services.config import SMARLRunConfig
from services.reservation import Reservation, Terms, outside, reserve

_REMEDY = (
    "add nodes, or lower workers.cpus_per_actor, placement.cpus_per_*, placement.custom_resources or "
    "workers.num_env_runners, or raise workers.agents_per_worker"
)


class TeamPlan:
    """Which bundles a run needs, and what lies in which of them."""

    def __init__(self, config: SMARLRunConfig) -> None:
        settings = config.placement
        most = max(config.schedule.values())
        count = -(-most // (config.workers.agents_per_worker or most))
        self._worker = _options(config, "worker")
        self._coordinator, self._runner = _options(config, "coordinator"), _options(config, "runner")
        self._spread = settings.strategy != "pack"
        # With an agent a node, what all agents share lies beside them: a bundle of its own could push two together.
        beside = settings.strategy == "per_agent_node"
        helpers = range(1 + config.workers.num_env_runners)
        self._workers = list(range(count))
        self._helpers = [k % count if beside else count + k for k in helpers]
        self.terms = Terms(
            "SPREAD" if self._spread else "PACK", settings.timeout_s, settings.wait_for_autoscaler, _REMEDY
        )

    @property
    def bundles(self) -> list[Resources]:
        """What each of them holds."""
        kinds = [self._coordinator, *[self._runner] * (len(self._helpers) - 1)]
        lying = [*((k, self._worker) for k in self._workers), *zip(self._helpers, kinds, strict=True)]
        count = 1 + max(index for index, _ in lying)
        return [bundle_of(asked(o) for index, o in lying if index == bundle) for bundle in range(count)]


class TeamPlaces(TeamPlan):
    """The run's room in the cluster.

    Raises:
        PlacementError: there can never be room.
        WaitLimitError: there was none in time.
    """

    def __init__(self, config: SMARLRunConfig) -> None:
        super().__init__(config)
        self._reservation: Reservation = reserve(self.bundles, self.terms)

    def coordinator(self) -> dict[str, Any]:
        """Ray options of the coordinator."""
        return self._reservation.options(self._helpers[0], self._coordinator)

    def runner(self, number: int) -> dict[str, Any]:
        """Those of an environment runner."""
        return self._reservation.options(self._helpers[1 + number], self._runner)

    def worker(self, seat: int) -> dict[str, Any]:
        """Those of a DDPG worker in `seat`, counted from 0."""
        if seat < len(self._workers):
            return self._reservation.options(self._workers[seat], self._worker)
        return outside(self._worker, spread=self._spread)

    def nodes(self) -> Sequence[str]:
        """Ids of the nodes on which the run is."""
        return self._reservation.nodes()

    def release(self) -> None:
        """Give the room back."""
        self._reservation.release()


def _options(config: SMARLRunConfig, kind: str) -> dict[str, Any]:
    settings = config.placement
    cpus = getattr(settings, f"cpus_per_{kind}")
    options: dict[str, Any] = {"num_cpus": config.workers.cpus_per_actor if cpus is None else cpus}
    custom = dict(settings.custom_resources).get(kind)  # type: ignore[call-overload]
    return {**options, "resources": custom} if custom else options
