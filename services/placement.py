"""Where the actors of a language-model run go: from the configuration to resources, bundles and torch devices.

Arithmetic alone: starts nothing, asks Ray nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from services.bundles import Resources, asked, bundle_of, pack_greedily, total
from services.config import Strategy

__all__ = ["REMEDY", "ActorPlacement", "Placement", "Shares", "Widths", "plan_placement"]

RAY_CHOOSES = "cuda"
"""A GPU without a number.  Where there are several nodes, Ray picks it; on a single one it is the first."""

REMEDY = (
    "add nodes, or lower placement.cpus_per_*, placement.gpus_per_*, placement.custom_resources, "
    "engine.workers_per_agent, engine.tensor_parallel_size, learner.ranks_per_policy or learner.ranks_per_critic"
)
"""Against a cluster that is too small."""


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """Ray options of one actor, the torch device that it uses, and which bundle it lies in."""

    options: dict[str, Any]
    device: str
    bundle: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where everything of a run goes."""

    workers: list[list[ActorPlacement]]
    """`[agent][replica]`: generation workers."""
    policies: list[list[ActorPlacement]]
    """`[agent][rank]`."""
    critics: dict[str, list[ActorPlacement]]
    """Name -> the ranks of a learner of critics; its name is its device where all critics of a device share one."""
    critic_actors: list[str]
    """Which of `critics` holds each critic."""
    reference_devices: list[str | None]
    bundles: list[Resources]
    group_strategy: str
    """Of Ray's placement group."""

    def everyone(self) -> list[ActorPlacement]:
        """All actors."""
        return [*chain.from_iterable([*self.workers, *self.policies, *self.critics.values()])]


@dataclass(frozen=True, slots=True)
class Shares:
    """What each kind of actor asks for; None is worked out from what the cluster has, a critic's from a learner's."""

    cpus_per_generation_worker: float | None = None
    gpus_per_generation_worker: float | None = None
    cpus_per_learner: float | None = None
    gpus_per_learner: float | None = None
    cpus_per_critic: float | None = None
    gpus_per_critic: float | None = None
    custom_resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Kind -> label -> amount."""


@dataclass(frozen=True, slots=True)
class Widths:
    """How many devices one model is spread over."""

    ranks_per_policy: int = 1
    ranks_per_critic: int = 1
    tensor_parallel_size: int = 1
    """Of a generation worker, which is one actor all the same."""

    def any(self) -> bool:
        return max(self.ranks_per_policy, self.ranks_per_critic, self.tensor_parallel_size) > 1


@dataclass(slots=True)
class _Actor:
    """An actor on its way to a placement."""

    kind: str
    device: str
    agent: int | None
    """Whose it is; None: several agents share it."""
    cpus: float | None
    gpus: float | None
    needs_gpu: bool
    bundle: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def plan_placement(
    *,
    num_agents: int,
    workers_per_agent: int,
    agent_devices: Sequence[str],
    critic_devices: Sequence[str],
    reference_devices: Sequence[str] | None,
    shares: Shares,
    nodes: Sequence[Resources],
    strategy: Strategy = "pack",
    critic_owners: Sequence[int | None] | None = None,
    widths: Widths | None = None,
    with_learners: bool = True,
) -> Placement:
    """Resources for every actor of a run.

    Devices are named per agent ("cpu", "cuda", "cuda:1").  An agent's generation workers use its device too.  CPUs are
    shared evenly where nothing is set: engines and learners take turns, so more processes than cores are no loss.  A
    GPU is shared evenly by the actors on it.  A numbered GPU is found by its number, so Ray's own masking of devices is
    turned off for its actors, and all of them must be on one node; which of several nodes' GPUs "cuda" means, Ray says.
    So it does where a model is spread over several, each of which it then has for itself.

    Args:
        nodes: what each node has when nothing runs on it.
        critic_owners: for each critic the only agent it judges, or None; default: nobody's.
        with_learners: False plans the generation workers alone.
    """
    widths = widths or Widths()
    several = len(nodes) > 1 or strategy != "pack" or widths.any()
    owners = [None] * len(critic_devices) if critic_owners is None else list(critic_owners)
    references = list(reference_devices) if reference_devices else [None] * num_agents

    def chosen(device: str | None) -> bool:
        return several and device == RAY_CHOOSES

    workers = [
        _Actor(
            "generation_worker", device, agent, shares.cpus_per_generation_worker,
            _whole(shares.gpus_per_generation_worker, widths.tensor_parallel_size, widths.tensor_parallel_size),
            device != "cpu",
        )
        for agent, device in enumerate(agent_devices)
        for _ in range(workers_per_agent)
    ]  # fmt: skip
    policies = [
        _Actor(
            "learner", device, agent, shares.cpus_per_learner,
            _whole(shares.gpus_per_learner, 1, widths.ranks_per_policy),
            device != "cpu" or chosen(references[agent]),
        )
        for agent, device in enumerate(agent_devices)
        for _ in range(widths.ranks_per_policy)
    ]  # fmt: skip
    by_device = strategy == "pack" and not any(chosen(device) for device in critic_devices)
    names = [device if by_device else f"critic_{key}" for key, device in enumerate(critic_devices)]
    critic_gpus = shares.gpus_per_learner if shares.gpus_per_critic is None else shares.gpus_per_critic
    critics = {
        name: [
            _Actor(
                "critic", device, None if by_device else owner,
                shares.cpus_per_learner if shares.cpus_per_critic is None else shares.cpus_per_critic,
                _whole(critic_gpus, 1, widths.ranks_per_critic),
                device != "cpu",
            )
            for _ in range(widths.ranks_per_critic)
        ]
        for name, device, owner in zip(names, critic_devices, owners, strict=True)
    }  # fmt: skip
    learners = [*policies, *chain.from_iterable(critics.values())]
    everyone = [*workers, *(learners if with_learners else [])]
    numbered = any(a.device.startswith("cuda") and not chosen(a.device) for a in everyone)
    # Numbers of GPUs mean something on one node only.
    one_node = numbered and len(nodes) > 1
    _share_gpus(everyone, chosen, sum(node.get("GPU", 0) for node in nodes))
    count = _assign_bundles(everyone, strategy, num_agents, len(nodes))
    _share_cpus(everyone, count, [max(nodes, key=lambda n: n.get("CPU", 0))] if one_node else nodes)
    for actor in everyone:
        actor.options |= _options(actor, chosen(actor.device), shares.custom_resources.get(actor.kind, {}))

    def placed(actor: _Actor) -> ActorPlacement:
        return ActorPlacement(actor.options, "cuda:0" if chosen(actor.device) else actor.device, actor.bundle)

    return Placement(
        workers=[[placed(a) for a in workers if a.agent == agent] for agent in range(num_agents)],
        policies=[[placed(a) for a in policies if a.agent == agent] for agent in range(num_agents)],
        critics={name: [placed(a) for a in ranks] for name, ranks in critics.items()},
        critic_actors=names,
        reference_devices=["cuda:0" if chosen(device) else device for device in references],
        bundles=[
            bundle_of(asked(a.options) for a in everyone if a.bundle == index) for index in range(count)
        ],
        group_strategy="STRICT_PACK" if one_node else "PACK" if strategy == "pack" else "SPREAD",
    )


def _whole(gpus: float | None, each: int, width: int) -> float | None:
    """GPUs of an actor that is one of several, or needs several: whole ones where nothing is set."""
    return float(each) if gpus is None and width > 1 else gpus


def _share_gpus(everyone: Sequence[_Actor], chosen: Callable[[str | None], bool], gpus: float) -> None:
    """A GPU's actors take equal parts of it; so do all those whose GPU Ray picks, of what GPUs others leave."""
    users = Counter(actor.device for actor in everyone if actor.needs_gpu)
    by_ray = [a for a in everyone if a.needs_gpu and (chosen(a.device) or a.device == "cpu")]
    picked = sum(actor.gpus is None for actor in by_ray)
    gpus -= sum(actor.gpus or 0.0 for actor in by_ray)
    for actor in everyone:
        if not actor.needs_gpu or actor.gpus is not None:
            continue
        numbered = actor.device != "cpu" and not chosen(actor.device)
        # Rounded up: one actor's part must be on one GPU.
        each = users[actor.device] if numbered else max(1, math.ceil(picked / max(1.0, math.floor(gpus))))
        actor.gpus = math.floor(10_000 / each) / 10_000


def _assign_bundles(everyone: Sequence[_Actor], strategy: Strategy, num_agents: int, nodes: int) -> int:
    """One bundle per actor; or one per agent, which cannot be torn apart.  Returns how many there are."""
    if strategy != "per_agent_node":
        for index, actor in enumerate(everyone):
            actor.bundle = index
        return len(everyone)
    count = num_agents
    for actor in everyone:
        actor.bundle = 0 if actor.agent is None else actor.agent
        # With more bundles than nodes, a shared critic could push two agents onto one node.
        if actor.agent is None and nodes > num_agents:
            actor.bundle, count = count, count + 1
    return count


def _share_cpus(everyone: Sequence[_Actor], count: int, nodes: Sequence[Resources]) -> None:
    """Where nothing is set, equal parts of all CPUs, but no more than fits: what one node has left is of no use on
    another."""
    cpus = sum(node.get("CPU", 0) for node in nodes)
    even = min(1.0, math.floor(cpus / len(everyone) * 10_000) / 10_000) or 1.0  # no CPU at all: wait for some

    def bundles(share: float) -> list[Resources]:
        parts: list[list[Resources]] = [[] for _ in range(count)]
        for actor in everyone:
            parts[actor.bundle].append({"CPU": share if actor.cpus is None else actor.cpus})
        return [total(part) for part in parts]

    share = even
    while share > 0.001 and not pack_greedily(bundles(share), nodes):
        share *= 0.95
    # Where nothing fits, that is for whoever reserves to say, of what would be fair.
    even = math.floor(share * 10_000) / 10_000 if share > 0.001 else even
    for actor in everyone:
        actor.cpus = even if actor.cpus is None else actor.cpus


def _options(actor: _Actor, chosen: bool, custom: Mapping[str, float]) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": actor.cpus}
    if custom:
        options["resources"] = dict(custom)
    if not actor.needs_gpu:
        return options
    options["num_gpus"] = actor.gpus
    if chosen or actor.device == "cpu":
        return options
    environment = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    if actor.kind == "generation_worker":
        # vLLM takes the first device it sees.
        environment["CUDA_VISIBLE_DEVICES"] = actor.device.partition(":")[2] or "0"
    options["runtime_env"] = {"env_vars": environment}
    return options
