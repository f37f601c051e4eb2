"""A run's room in the cluster: one Ray placement group, made at the start, removed at the end.

Owns the wait for it, and the refusal of what can never be there.  Knows bundles, not what lies in them.  Ray itself
removes the group of a driver that died, and finds new nodes for the bundles of a node that died.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray._private.state import state as cluster_state
from ray.util import get_current_placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.limits import WaitLimitError
from services.bundles import PlacementError, Resources, in_words, total, what_is_missing

logger = logging.getLogger(__name__)

_TELL_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Terms:
    """How a run wants its room."""

    strategy: str
    """Of Ray's placement group."""
    timeout_s: float
    wait_for_autoscaler: bool | None
    """None: if Ray reports an autoscaler."""
    remedy: str
    """Ends the sentence that says what is missing."""


class Reservation:
    """The bundles of a run.

    Args:
        first: which bundle of the group is the run's first; None: each actor goes where the group has room.
        owned: whether the group is the run's own and ends with it.
    """

    def __init__(self, group: PlacementGroup, count: int, *, first: int | None, owned: bool) -> None:
        self._group, self._count, self._first, self._owned = group, count, first, owned
        self._of_a_trial = not owned

    def __len__(self) -> int:
        return self._count

    def options(self, bundle: int, options: dict[str, Any]) -> dict[str, Any]:
        """Ray options of an actor in `bundle`; it stays there when Ray restarts it."""
        index = -1 if self._first is None else self._first + bundle
        return {
            **options,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
        }

    def nodes(self) -> list[str]:
        """Ids of the nodes on which the bundles lie now."""
        where = placement_group_table(self._group)["bundles_to_node_id"]
        return sorted({node for node in where.values() if node})

    @property
    def of_a_trial(self) -> bool:
        """Whether the group is Ray Tune's; what lies outside it is other trials'."""
        return self._of_a_trial

    def release(self) -> None:
        """Give the room back; safe to call twice, and after Ray has been shut down."""
        if self._owned and ray.is_initialized():
            remove_placement_group(self._group)
        self._owned = False


def outside(options: dict[str, Any], *, spread: bool) -> dict[str, Any]:
    """Ray options of an actor for which no bundle was foreseen: it goes where the cluster has room."""
    return {**options, "scheduling_strategy": "SPREAD" if spread else "DEFAULT"}


def node_resources() -> list[Resources]:
    """What each living node has when nothing runs on it."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def free_resources() -> list[Resources]:
    """What each living node has left now; what has just been taken or given back may not show yet."""
    nodes: dict[str, Resources] = available_resources_per_node()
    return list(nodes.values())


def reserve(bundles: Sequence[Resources], terms: Terms) -> Reservation:
    """Room for all of `bundles` at once.

    Inside a trial of Ray Tune, that is in the trial's own group.

    Raises:
        PlacementError: there can never be room; says what is missing.
        WaitLimitError: there was none within `terms.timeout_s`.
    """
    trial = get_current_placement_group()
    if trial is not None:
        return _in_trial(trial, bundles)
    waits_for = refuse_impossible(bundles, terms)
    group = placement_group(list(bundles), strategy=terms.strategy)
    try:
        _wait(group, bundles, terms, waits_for)
    except BaseException:
        remove_placement_group(group)
        raise
    return Reservation(group, len(bundles), first=0, owned=True)


def _in_trial(group: PlacementGroup, bundles: Sequence[Resources]) -> Reservation:
    """The group that Ray Tune made for this trial.  Its last bundles are the run's, if it was made to measure."""
    there = group.bundle_specs
    first = len(there) - len(bundles)
    if first >= 0 and there[first:] == list(bundles):
        return Reservation(group, len(bundles), first=first, owned=False)
    missing = what_is_missing([total(bundles)], [total(there)], one_node=True)
    if missing:
        raise PlacementError(
            f"the trial's placement group is too small for the run: {'; '.join(missing)}: give the trial more resources"
        )
    return Reservation(group, len(bundles), first=None, owned=False)


def refuse_impossible(bundles: Sequence[Resources], terms: Terms) -> str | None:
    """What the cluster lacks, if that may still come.

    Raises:
        PlacementError: it cannot.
    """
    missing = what_is_missing(bundles, node_resources(), one_node=terms.strategy == "STRICT_PACK")
    if not missing:
        return None
    text = "; ".join(missing)
    reachable = cluster_state.get_max_resources_from_cluster_config()  # None without an autoscaler
    waits = reachable is not None if terms.wait_for_autoscaler is None else terms.wait_for_autoscaler
    if not waits:
        raise PlacementError(f"the cluster cannot hold the run: {text}: {terms.remedy}")
    never = what_is_missing([total(bundles)], [reachable], one_node=True) if reachable else []
    if never:
        raise PlacementError(
            f"not even all nodes that the autoscaler may add can hold the run: {'; '.join(never)}: {terms.remedy}"
        )
    logger.info(
        "the cluster lacks room (%s); waiting for the autoscaler up to %g s (placement.timeout_s)",
        text,
        terms.timeout_s,
    )
    return text


def _wait(group: PlacementGroup, bundles: Sequence[Resources], terms: Terms, waits_for: str | None) -> None:
    started = time.monotonic()
    wanted = f"{in_words(total(bundles))} in {len(bundles)} bundle{'s' * (len(bundles) > 1)}"
    while True:
        left = terms.timeout_s - (time.monotonic() - started)
        # Ray counts whole seconds, and none at all would be no wait.
        if group.wait(max(1, math.ceil(min(_TELL_EVERY_S, left)))):
            return
        free = ray.available_resources()
        present = in_words({label: free.get(label, 0) for label in total(bundles)})
        lacks = f"; the cluster lacks nodes: {waits_for}" if waits_for else ""
        waited = time.monotonic() - started
        if waited >= terms.timeout_s:
            raise WaitLimitError(
                f"waited {terms.timeout_s:g} s for {wanted}, free are {present}{lacks}. Raise "
                f"placement.timeout_s, end what else runs there, or {terms.remedy}"
            )
        logger.info(
            "waiting for room: %s; free: %s%s; %.0f of %g s (placement.timeout_s)",
            wanted,
            present,
            lacks,
            waited,
            terms.timeout_s,
        )
