"""A learner that is one or several processes, seen from the driver: calls go to all ranks, failures end all of them.

Owns how ranks find one another, and what happens when one is lost.  Must not know what they compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.limits import WaitLimitError
from services.waiting import fetch

_GRACE_S = 30.0
"""After one rank has failed: the others fail too, or wait for it in vain.  And for an answer to get here."""


class LearnerLostError(RuntimeError):
    """A learner's process ended; its weights since the last checkpoint are gone."""


class RankGroup:
    """The ranks of one learner.

    Args:
        label: names it in errors, such as "agent 0".
        actors: one per rank.
    """

    def __init__(self, label: str, actors: Sequence[Any]) -> None:
        self.label = label
        self.actors = list(actors)
        self.nodes = ["?"] * len(self.actors)
        self._lock = threading.Lock()

    def start(self, start_timeout_s: float, call_timeout_s: float) -> Call:
        """Have the ranks meet and load their models."""
        if len(self.actors) == 1:
            return self.call("ready")
        # Handed on by reference: whoever is there first waits for it.
        place = self.actors[0].meet_at.remote(start_timeout_s)
        return self.call("join", place, start_timeout_s, call_timeout_s)

    def started(self, call: Call) -> None:
        """Remember where the ranks are, once `start` is through."""
        if len(self.actors) > 1:
            self.nodes = ray.get(call.refs, timeout=_GRACE_S)

    def call(self, method: str, *arguments: Any, **named: Any) -> Call:
        """The same call of every rank."""
        with self._lock:  # from several threads: every rank must get calls in the same order
            return Call(self, [getattr(actor, method).remote(*arguments, **named) for actor in self.actors])

    def end(self) -> None:
        """End every rank."""
        for actor in self.actors:
            ray.kill(actor, no_restart=True)


@dataclass(frozen=True, slots=True)
class Call:
    """A call on its way through the ranks of a learner."""

    group: RankGroup
    refs: list[Any]
    """One per rank; the first is the answer."""

    @property
    def answer(self) -> Any:
        return self.refs[0]


def results_of(calls: Sequence[Call], what: str, seconds: float, remedy: str) -> list[Any]:
    """The answers to all `calls`; nothing runs on any more when the first error is raised.

    Raises:
        LearnerLostError: a learner died, or one of its ranks, which is named with its node; its others are ended.
        WaitLimitError: not all answers were there after `seconds`; says `what` was waited for and the `remedy`.
        Exception: the first error among the answers.
    """
    if any(len(call.refs) > 1 for call in calls):
        _watch_ranks(calls, what, seconds, remedy)
    try:
        return fetch([call.answer for call in calls], what, seconds, remedy)
    except RayActorError as error:
        raise _lost("a learner", what, error) from error


def _lost(who: str, what: str, error: Exception) -> LearnerLostError:
    return LearnerLostError(
        f"{who} died while the run waited for {what}: {error}. Continue from the last checkpoint with "
        "`greenroom train --resume RUN_DIR`; if it was out of memory, lower learner.micro_batch_tokens."
    )


def _watch_ranks(calls: Sequence[Call], what: str, seconds: float, remedy: str) -> None:
    """Wait until every rank is done.  One that fails leaves its group's others waiting for it: they are ended."""
    pending = {ref: (call, rank) for call in calls for rank, ref in enumerate(call.refs)}
    end = time.monotonic() + seconds
    failed: dict[RankGroup, _Failure] = {}
    while pending:
        left = end - time.monotonic()
        if left <= 0:
            late = ", ".join(f"rank {rank} of {call.group.label}" for call, rank in pending.values())
            raise WaitLimitError(f"waited {seconds:g} s for {what}; still not done: {late}. {remedy}")
        limit = min(left, 1.0) if failed else left
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=limit, fetch_local=False)
        for ref in ready:
            call, rank = pending.pop(ref)
            error = _error_of(ref) if len(call.refs) > 1 else None
            known = failed.get(call.group)
            # The others complain of a dead rank's absence, and may do so before its death is known.
            if error is not None and (known is None or (_is_death(error) and not _is_death(known.error))):
                failed[call.group] = _Failure(rank, error, time.monotonic())
        for group in {call.group for call, _ in pending.values()} & failed.keys():
            if _is_death(failed[group].error) or time.monotonic() - failed[group].since > _GRACE_S:
                group.end()
    for group, failure in failed.items():
        rank, error = failure.rank, failure.error
        if _is_death(error):
            group.end()
            place = f"rank {rank} of {len(group.actors)} of {group.label}, on node {group.nodes[rank]},"
            raise _lost(place, what, error) from error
        if rank > 0:  # rank 0's own error is its answer
            raise error


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    error: Exception
    since: float


def _is_death(error: Exception) -> bool:
    return isinstance(error, RayActorError)


def _error_of(ref: Any) -> Exception | None:
    found: Exception | None = None
    try:
        ray.get(ref, timeout=_GRACE_S)
    except RayTaskError as error:
        found = error.cause if isinstance(error.cause, Exception) else error
    except RayActorError as error:
        found = error
    return found
