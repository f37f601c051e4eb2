"""Keeps one coordinator alive: a successor stands exactly where a lost one stood.

Owns the coordinator's last state and the journal of what was asked of it since.  Knows nothing of what the calls mean.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, ObjectLostError, RayActorError

from actors.generation_pool import WorkerLostError
from actors.recovery import recovering
from actors.smarl.coordinator import CoordinatorSpec, SMARLCoordinator
from services.remote_control import NAMESPACE
from services.waiting import fetch, wait_all

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_LONGEST_JOURNAL = 200
"""Calls after which a state is taken in any case; the journal keeps all that they brought."""
_REMEDY = "Raise workers.timeout_s if it needs longer."


class CoordinatorKeeper:
    """Calls the coordinator, and replaces it when it has died.

    Args:
        name: under which other processes find the actor in the namespace `greenroom`.
        options: Ray options of the actor.
        timeout_s: longest wait for any answer.
    """

    def __init__(
        self, spec: CoordinatorSpec, num_agents: int, name: str, options: dict[str, Any], timeout_s: float
    ) -> None:
        self._spec, self._num_agents, self._timeout_s = spec, num_agents, timeout_s
        self._options = {**options, "name": name, "namespace": NAMESPACE, "max_restarts": 0}
        self._state: Any = None
        self._journal: list[tuple[str, tuple[Any, ...]]] = []
        self._unanswered: list[Any] = []
        self.restarts = 0
        self._start()

    def ask(self, method: str, *args: Any) -> Any:
        """The answer to a question that changes nothing."""
        return self._attempt(
            lambda: fetch([self._call(method, args)], self._named(method), self._timeout_s, _REMEDY)[0]
        )

    def tell(self, method: str, *args: Any) -> Any:
        """The answer to a call that changes the coordinator's state."""
        answer = self.ask(method, *args)
        self._journal.append((method, args))
        return answer

    def tell_later(self, method: str, *args: Any) -> None:
        """The same without waiting; `settle` waits."""
        self._journal.append((method, args))
        self._unanswered.append(self._call(method, args))

    def settle(self) -> None:
        """Wait for everything told later; its errors are raised here.

        Raises:
            ObjectLostError: what it was told of was lost with its node.
        """
        self._answered()
        if len(self._journal) >= _LONGEST_JOURNAL:
            self.remember()

    def sync(self, firsts: Sequence[int], rows: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Soft updates; `rows` are references.  Returns the distances [N], and references to the agents' new rows."""
        answers: list[Any] = []

        def attempt() -> Any:
            answers[:] = self._handle.sync.options(num_returns=3 + len(rows)).remote(firsts, *rows)
            return fetch([answers[2]], "soft updates with the centre", self._timeout_s, _REMEDY)[0]

        distances = self._attempt(attempt)
        self._journal.append(("sync", (firsts, *rows)))
        return distances, answers[3:]

    def reference(self, method: str) -> Any:
        """Reference to an answer, for another actor; the driver never holds it."""

        def attempt() -> Any:
            ref = self._call(method, ())
            wait_all([ref], self._named(method), self._timeout_s, _REMEDY)
            fetch([self._handle.ready.remote()], "the coordinator", self._timeout_s, _REMEDY)
            return ref

        return self._attempt(attempt)

    def remember(self) -> None:
        """Take a state from which a successor starts; forget the journal."""
        self._answered()
        # On the driver's node: what lies on the coordinator's would be lost together with it.
        self._state = ray.put(self.ask("state"))
        self._journal.clear()

    def mend(self) -> None:
        """Have a coordinator that lives, and expect no answer any more."""
        self._unanswered = []
        self.ask("ready")

    def shutdown(self) -> None:
        ray.kill(self._handle, no_restart=True)

    def _start(self) -> None:
        actor = ray.remote(SMARLCoordinator).options(**self._options)
        # Kept before it is up: one that never gets there has the name, and has to be ended as well.
        self._handle = call_when_free(lambda: actor.remote(self._spec, self._num_agents), self._timeout_s)
        fetch([self._handle.ready.remote()], "the coordinator to start", self._timeout_s, _REMEDY)

    def _answered(self) -> None:
        unanswered, self._unanswered = self._unanswered, []
        if not unanswered:
            return
        try:
            fetch(unanswered, "the coordinator", self._timeout_s, _REMEDY)
        except RayActorError as error:
            self._succeed(error)  # the journal holds what was told

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self._handle, method).remote(*args)

    def _named(self, method: str) -> str:
        return f"the coordinator ({method})"

    def _attempt(self, attempt: Any) -> Any:
        for _ in range(_ATTEMPTS):
            try:
                return attempt()
            except RayActorError as error:
                self._succeed(error)
        raise _lost()

    def _succeed(self, error: RayActorError) -> None:
        """Have a successor that stands where the lost one stood; it may be lost in turn while it catches up."""
        for _ in range(_ATTEMPTS):
            self.restarts += 1
            self._unanswered = []
            ray.kill(self._handle, no_restart=True)  # it may only be out of reach
            try:
                with recovering("the coordinator", error, "a successor takes over"):
                    self._start_successor()
                return
            except RayActorError as again:
                error = again
        raise _lost()

    def _start_successor(self) -> None:
        """Start from the last state, and tell again what was told since."""
        self._start()
        calls = [] if self._state is None else [self._handle.load_state.remote(self._state)]
        for method, args in self._journal:
            returns = len(args) + 2 if method == "sync" else 1
            made = getattr(self._handle, method).options(num_returns=returns).remote(*args)
            calls.append(made[2] if method == "sync" else made)
        forgotten = sum(not self._caught_up(call) for call in calls)
        if forgotten:
            logger.warning("%d calls of the coordinator were lost with what they brought to it", forgotten)

    def _caught_up(self, call: Any) -> bool:
        """Wait for a call that is made again; False if what it brings was on a node that died."""
        try:
            fetch([call], "the coordinator's successor to catch up", self._timeout_s, _REMEDY)
        except ObjectLostError:
            return False
        return True


def _lost() -> WorkerLostError:
    return WorkerLostError(
        f"the coordinator died {_ATTEMPTS} times in a row; continue from the last checkpoint with "
        "`greenroom train --resume RUN_DIR`, on a node with more memory if that was what it lacked"
    )


def call_when_free(start: Callable[[], Any], seconds: float) -> Any:
    """Start a named actor; a predecessor whose end is not known everywhere yet may hold the name for a moment."""
    end = time.monotonic() + seconds
    while True:
        try:
            return start()
        except ActorAlreadyExistsError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
