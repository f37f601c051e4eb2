"""Where actors run: from the configuration to Ray resources and torch devices.  Starts nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class PlacementError(RuntimeError):
    """The cluster can never satisfy what the run asks for."""


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """Ray options of one actor and the torch device that it uses."""

    options: dict[str, Any]
    device: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything of a run goes."""

    workers: list[list[ActorPlacement]]
    """`[agent][replica]`: generation workers."""
    policies: list[ActorPlacement]
    critics: dict[str, ActorPlacement]
    """Device -> the actor that holds the critics of that device."""
    reference_devices: list[str | None]


@dataclass(frozen=True, slots=True)
class Shares:
    """CPUs and GPUs of each kind of actor; None is worked out from what the cluster has."""

    cpus_per_generation_worker: float | None = None
    gpus_per_generation_worker: float | None = None
    cpus_per_learner: float | None = None
    gpus_per_learner: float | None = None


def plan_placement(
    *,
    num_agents: int,
    workers_per_agent: int,
    agent_devices: Sequence[str],
    critic_devices: Sequence[str],
    reference_devices: Sequence[str] | None,
    shares: Shares,
    cluster_cpus: float,
    cluster_gpus: float,
) -> Placement:
    """Resources for every actor of a run.

    Devices are named per agent ("cpu", "cuda", "cuda:1").  An agent's generation workers use its device too.  CPUs are
    shared evenly where nothing is set: engines and learners take turns, so more processes than cores are no loss.  A
    GPU is shared evenly by the actors on it; they find it by its number, not by Ray's choice, so Ray's own masking of
    devices is turned off for them.

    Raises:
        PlacementError: the shares add up to more than the cluster has.
    """
    critic_actors = list(dict.fromkeys(critic_devices))
    actors = num_agents * (workers_per_agent + 1) + len(critic_actors)
    # Rounded down: Ray counts resources in ten-thousandths.
    even = min(1.0, math.floor(cluster_cpus / actors * 10_000) / 10_000)
    cpus_worker = shares.cpus_per_generation_worker
    cpus_learner = shares.cpus_per_learner
    cpus_worker = even if cpus_worker is None else cpus_worker
    cpus_learner = even if cpus_learner is None else cpus_learner
    users = Counter[str]()
    for device in agent_devices:
        users[device] += workers_per_agent + 1
    users.update(critic_actors)

    def place(device: str, cpus: float, gpus: float | None) -> ActorPlacement:
        options: dict[str, Any] = {"num_cpus": cpus}
        if device != "cpu":
            options["num_gpus"] = gpus if gpus is not None else math.floor(10_000 / users[device]) / 10_000
            options["runtime_env"] = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
        return ActorPlacement(options, device)

    def place_worker(device: str) -> ActorPlacement:
        placed = place(device, cpus_worker, shares.gpus_per_generation_worker)
        if device.startswith("cuda"):
            # vLLM takes the first device it sees.
            placed.options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] = (
                device.partition(":")[2] or "0"
            )
        return placed

    placement = Placement(
        workers=[[place_worker(device) for _ in range(workers_per_agent)] for device in agent_devices],
        policies=[place(device, cpus_learner, shares.gpus_per_learner) for device in agent_devices],
        critics={device: place(device, cpus_learner, shares.gpus_per_learner) for device in critic_actors},
        reference_devices=list(reference_devices) if reference_devices else [None] * num_agents,
    )
    _check_fits(placement, cluster_cpus, cluster_gpus)
    return placement


def _check_fits(placement: Placement, cluster_cpus: float, cluster_gpus: float) -> None:
    everyone = [
        *(w for agent in placement.workers for w in agent),
        *placement.policies,
        *placement.critics.values(),
    ]
    for resource, there in (("num_cpus", cluster_cpus), ("num_gpus", cluster_gpus)):
        needed = sum(actor.options.get(resource, 0) for actor in everyone)
        if needed > there + 1e-6:
            kind = resource.removeprefix("num_")
            raise PlacementError(
                f"the run's {len(everyone)} actors need {needed:g} {kind}, the cluster has {there:g}: add nodes, or "
                f"lower placement.{kind}_per_generation_worker, placement.{kind}_per_learner or "
                "engine.workers_per_agent"
            )
