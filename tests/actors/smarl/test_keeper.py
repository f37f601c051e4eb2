"""The coordinator's keeper with a real actor that dies: the successor is bit for bit what nobody had killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from teams import CONTINUOUS, assert_same, networks, random_rows, sequences

from actors.generation_pool import WorkerLostError
from actors.smarl.coordinator import CoordinatorSpec, SMARLCoordinator, TargetSpec
from actors.smarl.runner import PointerSpec
from services.smarl import keeper as keeper_module
from services.smarl.keeper import CoordinatorKeeper

pytestmark = pytest.mark.ray

SHAPES = networks(CONTINUOUS)
TARGET = TargetSpec(PointerSpec(3, 6, "dot"), 0.01, 2, 4, 50, None)
SPEC = CoordinatorSpec(SHAPES, 0.3, "random", True, 5, TARGET)


def rows(agents: int, seed: int) -> list[np.ndarray]:
    return [part.astype(np.float32) for part in random_rows(SHAPES, agents, seed)]


class Plain:
    """The keeper's face, before a coordinator whom nobody kills."""

    def __init__(self, spec: CoordinatorSpec = SPEC, agents: int = 3) -> None:
        self.coordinator = SMARLCoordinator(spec, agents)

    def tell(self, method: str, *args: Any) -> Any:
        return getattr(self.coordinator, method)(*args)

    ask = tell_later = tell

    def sync(self, firsts: list[int], pushed: list[Any]) -> tuple[Any, list[Any]]:
        answer = self.coordinator.sync(firsts, *ray.get(pushed))
        return answer[2], [ray.put(part) for part in answer[3:]]

    def reference(self, method: str) -> Any:
        return ray.put(self.tell(method))

    def settle(self) -> None:
        pass

    remember = settle


Keeper = CoordinatorKeeper | Plain
Step = tuple[str, Callable[[Keeper], Any]]


def sync(seed: int, *spans: tuple[int, int]) -> Callable[[Keeper], Any]:
    """Soft updates with a push of each span of agents; returns everything that came back."""

    def step(keeper: Keeper) -> Any:
        parts = [part for first, count in spans for part in rows(count, seed + first)]
        distances, back = keeper.sync([first for first, _ in spans], [ray.put(part) for part in parts])
        return [distances, *ray.get(back)]

    return step


def told(method: str, *args: Any) -> Callable[[Keeper], Any]:
    return lambda keeper: keeper.tell(method, *args)


RUN: list[Step] = [
    ("sync", sync(1, (2, 1), (0, 2))),
    ("observe", lambda k: k.tell_later("observe", sequences(20, 3, 3, 1))),
    ("observe", lambda k: k.tell_later("observe", sequences(9, 3, 3, 2), sequences(5, 2, 3, 2))),
    ("settle", lambda k: k.settle()),
    ("train_target", told("train_target", 0)),
    ("state", lambda k: k.remember()),
    ("target_weights", lambda k: ray.get(k.reference("target_weights"))),
    ("leave", told("leave", [1])),
    ("join", told("join", 2)),
    ("observe", lambda k: k.tell_later("observe", sequences(12, 4, 3, 3))),
    ("sync", sync(5, (0, 4))),
    ("identities", lambda k: k.ask("identities")),
    ("train_target", told("train_target", 25)),
    ("centre", lambda k: list(k.ask("centre"))),
]
"""What a run asks of its coordinator, and which method of it that calls."""


@pytest.fixture
def start(ray_cluster: None) -> Iterator[Callable[..., CoordinatorKeeper]]:
    keepers: list[CoordinatorKeeper] = []

    def made(**changes: Any) -> CoordinatorKeeper:
        values = {"num_agents": 3, "name": f"keeper-{os.getpid()}-{len(keepers)}", "timeout_s": 60.0}
        keepers.append(CoordinatorKeeper(SPEC, options={"num_cpus": 0.1}, **{**values, **changes}))
        return keepers[-1]

    yield made
    for keeper in keepers:
        keeper.shutdown()


@pytest.fixture
def dies_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Have the coordinator die in its next calls of `methods`, after it has done all but answer."""
    folder = str(tmp_path)

    class Mortal(SMARLCoordinator):
        pass

    def mortal(name: str) -> Callable[..., Any]:
        def call(self: SMARLCoordinator, *args: Any) -> Any:
            answer = getattr(SMARLCoordinator, name)(self, *args)
            marks = sorted(Path(folder).glob(f"{name}-*"))
            if marks:
                marks[0].unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call

    for name in {name for name, _ in RUN} - {"settle"}:
        setattr(Mortal, name, mortal(name))
    monkeypatch.setattr(keeper_module, "SMARLCoordinator", Mortal)

    def mark(*methods: str) -> None:
        for count, method in enumerate(methods):
            (tmp_path / f"{method}-{count}").touch()

    return mark


def assert_equal(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)
    elif theirs is not None:
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def assert_as_undisturbed(keeper: CoordinatorKeeper, before: Callable[[int], None]) -> None:
    """Go through RUN, calling `before` each step: every answer and the state in the end are those of a plain one."""
    plain = Plain()
    for number, (_, step) in enumerate(RUN):
        before(number)
        assert_equal(step(keeper), step(plain))
    keeper.settle()
    assert_same(keeper.ask("state"), plain.ask("state"))


def test_a_coordinator_killed_between_calls_has_a_bit_equal_successor(
    start: Callable[..., CoordinatorKeeper],
) -> None:
    keeper = start()
    killed = {
        1,
        6,
        10,
    }  # before something is told, before a reference, between what is told later and its answer

    def kill(number: int) -> None:
        if number in killed:
            ray.kill(keeper._handle, no_restart=True)

    assert_as_undisturbed(keeper, kill)
    assert keeper.restarts == len(killed)


@pytest.mark.slow
def test_a_coordinator_that_dies_in_a_call_has_a_bit_equal_successor_also_while_that_catches_up(
    start: Callable[..., CoordinatorKeeper], dies_in: Callable[..., None]
) -> None:
    keeper = start()
    deaths = {
        0: ["sync"],  # with neither state nor journal
        2: ["observe"],  # not waited for
        4: ["train_target"],
        5: ["state"],  # while it tells its state
        10: ["sync", "observe"],  # the successor dies in what it is told again
    }
    assert_as_undisturbed(keeper, lambda number: dies_in(*deaths.get(number, [])))
    assert keeper.restarts == 6


def test_a_coordinator_that_always_dies_is_given_up(
    start: Callable[..., CoordinatorKeeper], dies_in: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "_ATTEMPTS", 1)
    keeper = start()
    dies_in(*["identities"] * 9)
    with pytest.raises(
        WorkerLostError, match="the coordinator died 1 times in a row; continue from the last"
    ):
        keeper.ask("identities")


def test_errors_of_the_coordinator_itself_are_raised_and_cost_no_successor(
    start: Callable[..., CoordinatorKeeper],
) -> None:
    keeper = start()
    with pytest.raises(ValueError, match=r"agents \[7\] do not exist; there are agents 0 to 2"):
        keeper.ask("request", 0, [7])
    bad = sequences(3, 3, 3, 1)
    bad.rewards[1] = np.nan
    keeper.tell_later("observe", bad)
    with pytest.raises(ValueError, match="the reward R\\^seq is nan"):
        keeper.settle()
    keeper.settle()  # told once
    assert keeper.restarts == 0


def test_the_journal_does_not_grow_without_end(
    start: Callable[..., CoordinatorKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "_LONGEST_JOURNAL", 5)
    keeper, plain = start(), Plain()
    lengths = []
    for seed in range(7):
        for each in (keeper, plain):
            sync(seed, (0, 3))(each)
            each.tell_later("observe", sequences(3, 3, 3, seed))
            each.settle()
        lengths.append(len(keeper._journal))
    assert max(lengths) < 5
    ray.kill(keeper._handle, no_restart=True)
    assert_same(keeper.ask("state"), plain.ask("state"))
