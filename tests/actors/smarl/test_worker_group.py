"""Groups of real DDPG workers that die, against plain workers that live."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
from teams import CONTINUOUS, assert_same, chunk, networks, random_rows

from actors.generation_pool import WorkerLostError
from actors.smarl.worker import METRICS, DDPGWorker, WorkerSpec
from learners.optimiser import NonFiniteLossError
from learners.smarl.ddpg import DDPGRules
from services.smarl.workers import WorkerGroup

pytestmark = pytest.mark.ray

SHAPES = networks(CONTINUOUS)
SPEC = WorkerSpec(SHAPES, DDPGRules(), 0.2, 4, 4, 2, 100, False, 3)
FIRST = [part.astype(np.float32) for part in random_rows(SHAPES, 8)]
CENTRE = [part[0].astype(np.float32) for part in random_rows(SHAPES, 1, seed=9)]


@pytest.fixture
def start(ray_cluster: None) -> Iterator[Callable[[int, int], WorkerGroup]]:
    groups: list[WorkerGroup] = []

    def made(agents: int, per_worker: int) -> WorkerGroup:
        group = WorkerGroup(SPEC, per_worker, lambda _: {"num_cpus": 0.1}, 60, lambda: (CENTRE[0], CENTRE[1]))
        groups.append(group)
        group.start(list(range(agents)), FIRST[0][:agents], FIRST[1][:agents])
        return group

    yield made
    for group in groups:
        group.shutdown()


def plain(identities: list[int], first: int) -> DDPGWorker:
    made = DDPGWorker(SPEC, identities, *(part[identities] for part in FIRST))
    made.number_from(first)
    return made


def successor(identities: list[int], first: int) -> DDPGWorker:
    """Who stands at the centre and has seen nothing."""
    made = DDPGWorker(SPEC, identities, *(np.stack([row] * len(identities)) for row in CENTRE))
    made.number_from(first)
    return made


def steps(agents: int, seed: int) -> Any:
    return chunk(CONTINUOUS, 6, agents, seed, copies=3)


def kill(group: WorkerGroup, index: int) -> None:
    """At once: Ray's own kill would let the worker answer for a moment more."""
    alive = group._members[index].handle.__ray_call__.remote(lambda _: os.getpid())
    os.kill(ray.get(alive, timeout=60), signal.SIGKILL)


def assert_group(group: WorkerGroup, *workers: DDPGWorker) -> None:
    """The group's agents are those of plain workers, in its own state and in what it hands out."""
    states = [worker.state() for worker in workers]
    state = {name: np.concatenate([each[name] for each in states]) for name in states[0]}
    assert_same(group.states(), state)
    np.testing.assert_array_equal(np.concatenate(ray.get(group.actors())), state["actor"])
    np.testing.assert_array_equal(np.concatenate(ray.get(group.parameters()[1::2])), state["critic"])


def test_a_lost_worker_is_replaced_from_the_centre_and_everyone_goes_on(
    start: Callable[[int, int], WorkerGroup],
) -> None:
    group = start(3, 2)
    assert (len(group), group.num_agents, group.firsts) == (2, 3, [0, 2])
    one, two = plain([0, 1], 0), plain([2], 2)
    group.learn(0, 6, 0, 0, [ray.put(steps(3, 0))])
    for worker in (one, two):
        worker.learn(0, 6, 0, 0, steps(3, 0))
    assert_group(group, one, two)

    kill(group, 1)  # while it learns: nobody has heard of its death yet
    metrics = group.learn(0, 6, 6, 6, [ray.put(steps(3, 1))])
    two = successor([2], 2)
    expected = [worker.learn(0, 6, 6, 6, steps(3, 1))[0] for worker in (one, two)]
    for name in METRICS:
        ours, theirs = metrics[name], expected[1][name][:, 0]
        np.testing.assert_array_equal(ours[:, :2], expected[0][name])
        missing = 6 - len(theirs)  # until it has seen enough
        assert missing > 0
        assert np.isnan(ours[:missing, 2]).all()
        np.testing.assert_array_equal(ours[missing:, 2], theirs)
    assert group.restarts == 1
    assert group.firsts == [0, 2]
    assert_group(group, one, two)

    kill(group, 0)  # while the centre's rows are on their way to it
    pulled = [(part[:3] + 1).astype(np.float32) for part in FIRST]
    group.pull([ray.put(part) for part in (pulled[0][:2], pulled[1][:2], pulled[0][2:], pulled[1][2:])])
    one = successor([0, 1], 0)
    two.pull(pulled[0][2:], pulled[1][2:])
    assert group.restarts == 2
    assert_group(group, one, two)


def test_teams_change_also_where_a_worker_has_died_meanwhile(
    start: Callable[[int, int], WorkerGroup],
) -> None:
    group = start(3, 2)
    kill(group, 0)
    group.leave([0])
    assert group.firsts == [0, 1]
    assert_group(group, successor([1], 0), plain([2], 1))
    kill(group, 1)
    group.join([3, 4])  # one beside agent 2, one in a worker of its own
    assert group.restarts == 2
    assert group.firsts == [0, 1, 3]
    one, two, three = successor([1], 0), successor([2, 3], 1), successor([4], 3)
    assert_group(group, one, two, three)
    group.learn(0, 6, 0, 0, [ray.put(steps(4, 2))])
    for worker in (one, two, three):  # by its number, everyone finds its own part of the steps
        worker.learn(0, 6, 0, 0, steps(4, 2))
    assert_group(group, one, two, three)
    group.leave([0, 1, 2, 3])
    assert (len(group), group.num_agents) == (0, 0)
    group.join([5])
    assert_group(group, successor([5], 0))


def test_a_worker_that_cannot_be_kept_alive_and_numbers_that_are_not_finite_end_the_run_with_their_reason(
    start: Callable[[int, int], WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = start(1, 1)
    bad = steps(1, 0)
    bad.rewards[:] = np.nan
    with pytest.raises(NonFiniteLossError, match="critic of agent 0"):
        group.learn(0, 6, 0, 0, [ray.put(bad)])
    assert group.restarts == 0
    replace = group._replace

    def short_lived(*args: Any) -> None:
        replace(*args)
        kill(group, 0)

    monkeypatch.setattr(group, "_replace", short_lived)
    kill(group, 0)
    with pytest.raises(
        WorkerLostError, match=r"a DDPG worker died 3 times in a row .* the agents' parameters"
    ):
        group.states()
