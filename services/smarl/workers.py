"""All DDPG workers of a run, seen from the driver: which agents are where, and what becomes of a worker that dies.

Owns the split of the agents over workers, in the order of their numbers.  Parameters pass through as references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from actors.generation_pool import WorkerLostError
from actors.recovery import recovering
from actors.smarl.worker import METRICS, DDPGWorker, WorkerSpec
from services.waiting import fetch, wait_all

_ATTEMPTS = 3
_REMEDY = "Raise workers.timeout_s if it needs longer."


@dataclass(slots=True)
class _Member:
    handle: Any
    seat: int
    identities: list[int]
    actor: Any
    """Reference to its agents' actors [K, Pa] as they are now."""
    critic: Any


class WorkerGroup:
    """Workers with up to `per_worker` agents each (None: one worker with all).

    Args:
        options: Ray options of the worker in a seat; seats are counted from 0, and one that is left is taken again.
        centre: returns the centre's actor [Pa] and critic [Pc], from which a lost worker's successor starts.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        per_worker: int | None,
        options: Callable[[int], dict[str, Any]],
        timeout_s: float,
        centre: Callable[[], tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self._spec, self._per_worker, self._timeout_s = spec, per_worker, timeout_s
        self._options = options
        self._centre = centre
        self._members: list[_Member] = []
        self.restarts = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def num_agents(self) -> int:
        return sum(len(member.identities) for member in self._members)

    @property
    def firsts(self) -> list[int]:
        """The number of each worker's first agent."""
        counts = [len(member.identities) for member in self._members]
        return [sum(counts[:k]) for k in range(len(counts))]

    def start(self, identities: Sequence[int], actor: np.ndarray, critic: np.ndarray) -> None:
        """Start the workers of the first agents."""
        size = self._per_worker or len(identities)
        for k in range(0, len(identities), size):
            part = slice(k, k + size)
            self._members.append(self._hire(identities[part], actor[part], critic[part]))
        self._renumber()

    def learn(
        self, start: int, stop: int, step: int, update: int, chunks: Sequence[Any]
    ) -> dict[str, np.ndarray]:
        """Every worker learns from the same steps of `chunks`; metrics are [updates, N], NaN where an agent took none.

        A worker that dies is replaced from the centre; its successor stores the same steps and goes on.

        Raises:
            NonFiniteLossError: an agent's loss or gradient is not finite.
        """

        def learn(member: _Member) -> Any:
            metrics, member.actor, member.critic = member.handle.learn.options(num_returns=3).remote(
                start, stop, step, update, *chunks
            )
            return metrics

        answers = self._everyone(learn, "DDPG workers to learn")
        updates = max(len(answer[METRICS[0]]) for answer in answers)

        def together(name: str) -> np.ndarray:
            return np.concatenate([_padded(answer[name], updates) for answer in answers], 1)

        return {name: together(name) for name in METRICS}

    def parameters(self) -> list[Any]:
        """References to each worker's actors and critics in turn."""
        return [ref for member in self._members for ref in (member.actor, member.critic)]

    def actors(self) -> list[Any]:
        """References to each worker's actors, the agents in order."""
        return [member.actor for member in self._members]

    def arrival_order(self) -> list[int]:
        """The workers in the order in which their parameters arrive."""
        waiting = {member.critic: k for k, member in enumerate(self._members)}
        order = []
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=self._timeout_s, fetch_local=False)
            wait_all(done or list(waiting), "a worker's parameters", self._timeout_s, _REMEDY)
            order += [waiting.pop(ref) for ref in done]
        return order

    def pull(self, rows: Sequence[Any]) -> None:
        """Hand each worker its new actors and critics, references in turn."""
        for k, member in enumerate(self._members):
            member.actor, member.critic = rows[2 * k], rows[2 * k + 1]
        self._everyone(
            lambda member: member.handle.pull.remote(member.actor, member.critic), "DDPG workers to pull"
        )

    def mend(self) -> None:
        """Replace who has died, and let go of parameters that were lost with a node."""
        self._roll_call()
        for member in self._members:
            self._refresh(member)

    def leave(self, numbers: Sequence[int]) -> None:
        """Agents `numbers` leave; a worker without agents ends."""
        self._roll_call()
        gone = set(numbers)
        for member, first in zip(list(self._members), self.firsts, strict=True):
            own = [k for k in range(len(member.identities)) if first + k in gone]
            if len(own) == len(member.identities):
                self._members.remove(member)
                ray.kill(member.handle, no_restart=True)
            elif own:
                self._leave(member, own)
        self._renumber()

    def _leave(self, member: _Member, own: list[int]) -> None:
        self._ask([member], lambda member: member.handle.leave.remote(own), "an agent to leave")
        member.identities = [i for k, i in enumerate(member.identities) if k not in own]
        self._refresh(member)

    def join(self, identities: Sequence[int]) -> None:
        """New agents, who start from the centre: first where there is room at the end, then in new workers."""
        self._roll_call()
        actor, critic = self._centre()
        size = self._per_worker or self.num_agents + len(identities)
        left = list(identities)
        while left:
            last = self._members[-1] if self._members else None
            room = 0 if last is None else size - len(last.identities)
            if last is not None and room > 0:
                joining, left = left[:room], left[room:]
                rows = (_repeated(actor, len(joining)), _repeated(critic, len(joining)))
                self._ask([last], _join(joining, rows), "an agent to join")
                last.identities += joining
                self._refresh(last)
            else:
                joining, left = left[:size], left[size:]
                rows = (_repeated(actor, len(joining)), _repeated(critic, len(joining)))
                self._members.append(self._hire(joining, *rows))
        self._renumber()

    def save(self, folder: str) -> None:
        """Write all agents into `folder`."""
        self._everyone(lambda member: member.handle.save.remote(folder), "DDPG workers to write a checkpoint")

    def load(self, folder: str) -> None:
        """Continue from what `save` wrote."""
        self._everyone(lambda member: member.handle.load.remote(folder), "DDPG workers to read a checkpoint")
        for member in self._members:
            self._refresh(member)

    def states(self) -> dict[str, np.ndarray]:
        """All agents' parameters and moments, in the order of their numbers."""
        answers = self._everyone(lambda member: member.handle.state.remote(), "the agents' parameters")
        return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}

    def shutdown(self) -> None:
        for member in self._members:
            ray.kill(member.handle, no_restart=True)
        self._members = []

    def _hire(
        self, identities: Sequence[int], actor: np.ndarray, critic: np.ndarray, seat: int | None = None
    ) -> _Member:
        if seat is None:
            taken = {member.seat for member in self._members}
            seat = next(k for k in count() if k not in taken)
        start = ray.remote(DDPGWorker).options(**self._options(seat), max_restarts=0)
        handle = start.remote(self._spec, list(identities), actor, critic)
        return _Member(handle, seat, list(identities), ray.put(actor), ray.put(critic))

    def _roll_call(self) -> None:
        self._everyone(lambda member: member.handle.ready.remote(), "DDPG workers to answer")

    def _refresh(self, member: _Member) -> None:
        member.actor, member.critic = member.handle.parameters.options(num_returns=2).remote()

    def _renumber(self) -> None:
        calls = [
            m.handle.number_from.remote(first) for m, first in zip(self._members, self.firsts, strict=True)
        ]
        fetch(calls, "DDPG workers to start", self._timeout_s, _REMEDY)

    def _everyone(self, call: Callable[[_Member], Any], what: str) -> list[Any]:
        """Every worker's answer to `call`; who dies is replaced and asked again.

        Raises:
            ObjectLostError: something that a worker was to read was lost with its node.
        """
        return self._ask(self._members, call, what)

    def _ask(self, members: Sequence[_Member], call: Callable[[_Member], Any], what: str) -> list[Any]:
        """The answers of `members`, as `_everyone` gets them."""
        answers: list[Any] = [None] * len(members)
        asked = {k: call(member) for k, member in enumerate(members)}
        for _ in range(_ATTEMPTS):
            wait_all(list(asked.values()), what, self._timeout_s, _REMEDY)
            lost: dict[int, RayError] = {}
            for k, ref in asked.items():
                try:
                    answers[k] = ray.get(ref, timeout=self._timeout_s)
                except RayActorError as error:
                    lost[k] = error
                except ObjectLostError as error:
                    if isinstance(error, RayTaskError):
                        raise  # what the worker was given is lost, not the worker
                    lost[k] = error
            if not lost:
                return answers
            for k, cause in lost.items():
                self._replace(members[k], cause)
            asked = {k: call(members[k]) for k in lost}
        raise WorkerLostError(
            f"a DDPG worker died {_ATTEMPTS} times in a row while the run waited for {what}; continue from the last "
            "checkpoint with `greenroom train --resume RUN_DIR`"
        )

    def _replace(self, member: _Member, error: RayError) -> None:
        """A successor for the same agents under the same numbers, from the centre's parameters."""
        self.restarts += 1
        first = self.firsts[self._members.index(member)]
        with recovering(
            f"the DDPG worker of agents {_span(member, first)}", error, "replaced from the centre"
        ):
            actor, critic = (_repeated(row, len(member.identities)) for row in self._centre())
            ray.kill(member.handle, no_restart=True)  # it may only be out of reach, and would keep its place
            successor = self._hire(member.identities, actor, critic, member.seat)
            member.handle, member.actor, member.critic = successor.handle, successor.actor, successor.critic
            fetch([member.handle.number_from.remote(first)], "a replaced worker", self._timeout_s, _REMEDY)


def _join(joining: list[int], rows: tuple[np.ndarray, np.ndarray]) -> Callable[[_Member], Any]:
    return lambda member: member.handle.join.remote(joining, *rows)


def _repeated(row: np.ndarray, count: int) -> np.ndarray:
    return np.repeat(row[None], count, 0)


def _padded(metrics: np.ndarray, updates: int) -> np.ndarray:
    """`metrics` [n, K] as [updates, K]; a worker that began later lacks the first ones."""
    missing = updates - len(metrics)
    return np.concatenate([np.full((missing, metrics.shape[1]), np.nan), metrics])


def _span(member: _Member, first: int) -> str:
    last = first + len(member.identities) - 1
    return str(first) if last == first else f"{first} to {last}"
