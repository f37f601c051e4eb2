"""A language-model run's plan and its room in the cluster: from the configuration to Ray options of every actor.

Owns the step from settings and sources to a placement that is reserved.  Starts no actor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from learners.critic_inputs import CriticLayout
from services.bundles import PlacementError, asked, pack_greedily
from services.config import ActorCriticConfig, IACConfig, RunConfig
from services.placement import REMEDY, ActorPlacement, Placement, Shares, Widths, plan_placement
from services.reservation import Reservation, Terms, free_resources, node_resources, outside, reserve


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the models of a run come from, every one a folder or hub identifier by now."""

    agents: Sequence[str]
    tokenizers: Sequence[str]
    critics: Sequence[str]
    """Distinct critic models; empty with a shared backbone."""
    critic_of_agent: Sequence[int]


@dataclass(frozen=True, slots=True)
class Room:
    """The plan of a run, and its room in the cluster."""

    placement: Placement
    reservation: Reservation
    cpus_chosen: bool
    """Whether the settings say how many CPUs a generation worker has."""

    def options(self, place: ActorPlacement) -> dict[str, Any]:
        """Ray options of an actor at `place`."""
        return self.reservation.options(place.bundle, place.options)

    def worker_options(self, agent: int, replica: int, *, crowded: bool) -> dict[str, Any]:
        """Those of a generation worker; one that was not planned for goes where the cluster has room.

        Args:
            crowded: it may do with CPUs that the plan has shared out, for engines and learners take turns.
        """
        planned = self.placement.workers[agent]
        if replica < len(planned):
            return self.options(planned[replica])
        options = dict(planned[-1].options)
        squeezed = crowded and not self.cpus_chosen
        if squeezed:
            options["num_cpus"] = 0
        return outside(options, spread=squeezed or self.placement.group_strategy == "SPREAD")

    def more_workers(self, most: int, *, crowded: bool) -> int:
        """For how many more generation workers of every agent, up to `most`, the nodes have free room now."""
        beyond = len(self.placement.workers[0])
        each = [
            asked(self.worker_options(agent, beyond, crowded=crowded))
            for agent in range(len(self.placement.workers))
        ]
        free = free_resources()
        return max(count for count in range(most + 1) if pack_greedily(each * count, free))


def take_room(config: RunConfig, sources: Sources, *, with_learners: bool = True) -> Room:
    """Plan for the nodes there are, and reserve what the plan needs.

    Raises:
        PlacementError: there can never be room.
        WaitLimitError: there was none in time.
    """
    placement = plan_room(config, len(sources.critics), sources.critic_of_agent, with_learners=with_learners)
    cpus_chosen = config.placement.cpus_per_generation_worker is not None
    return Room(placement, reserve(placement.bundles, terms_of(config, placement)), cpus_chosen)


def terms_of(config: RunConfig, placement: Placement) -> Terms:
    """How the run wants its room."""
    settings = config.placement
    return Terms(placement.group_strategy, settings.timeout_s, settings.wait_for_autoscaler, REMEDY)


def plan_room(
    config: RunConfig, num_critics: int, critic_of_agent: Sequence[int], *, with_learners: bool = True
) -> Placement:
    """The plan for the nodes there are; nothing is reserved.

    Args:
        num_critics: distinct critic models.
        critic_of_agent: which of them judges each agent.
    """
    args, settings = config.args, config.placement
    # A head that runs nothing but Ray itself is no place for an actor.
    nodes = [node for node in node_resources() if node.get("CPU") or node.get("GPU")]
    widths = Widths(
        config.learner.ranks_per_policy, config.learner.ranks_per_critic, config.engine.tensor_parallel_size
    )
    several = len(nodes) > 1 or settings.strategy != "pack" or widths.any()
    gpus = sum(node.get("GPU", 0) for node in nodes)
    one_device = "cpu" if gpus < 1 else "cuda" if several else "cuda:0"
    agent_devices = _devices(args.agent_devices, args.num_agents) or [one_device] * args.num_agents
    most = max((node.get("CPU", 0) for node in nodes), default=0)
    if widths.tensor_parallel_size > most and "cpu" in agent_devices:
        raise PlacementError(
            f"engine.tensor_parallel_size={widths.tensor_parallel_size}: on the CPU an engine is that many processes, "
            f"and the largest node has {most:g} CPUs: lower it"
        )
    judged = critic_layout(args, critic_of_agent).critic_of_agent
    return plan_placement(
        num_agents=args.num_agents,
        workers_per_agent=config.engine.workers_per_agent,
        agent_devices=agent_devices,
        critic_devices=_devices(args.critic_devices, num_critics) or [one_device] * num_critics,
        critic_owners=[judged.index(key) if judged.count(key) == 1 else None for key in range(num_critics)],
        reference_devices=_devices(args.reference_devices, args.num_agents),
        shares=Shares(
            **{name: getattr(settings, name) for name in Shares.__dataclass_fields__}  # named alike
        ),
        nodes=nodes,
        widths=widths,
        strategy=settings.strategy,
        with_learners=with_learners,
    )


def critic_layout(args: ActorCriticConfig, critic_of_agent: Sequence[int]) -> CriticLayout:
    """Who judges whom under the configured algorithm."""
    if not isinstance(args, IACConfig):
        return CriticLayout("joint", args.critic_type, (0,) * args.num_agents)
    if not args.use_separate_critic:
        return CriticLayout("backbone", args.critic_type)
    return CriticLayout("own", args.critic_type, tuple(critic_of_agent))


def _devices(devices: str | list[str] | None, count: int) -> list[str] | None:
    return [devices] * count if isinstance(devices, str) else devices
