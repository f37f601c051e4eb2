"""Replays the recorded DDPG runs through real workers and a real coordinator, however agents are spread over them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from recorded_ddpg import CASES, TOLERANCE, batch_of, row, rows, shapes

from actors.smarl.coordinator import CoordinatorSpec, SMARLCoordinator
from actors.smarl.worker import DDPGWorker, WorkerSpec
from learners.smarl.ddpg import DDPGRules

pytestmark = pytest.mark.ray

Rows = tuple[np.ndarray, np.ndarray]
SPLITS = {1: [[1]], 2: [[2], [1, 1]], 3: [[3], [2, 1], [1, 1, 1]]}
"""By number of agents: how many each worker hosts."""
STATS = {
    "td_target": "td_targets",
    "critic_loss": "critic_loss",
    "actor_loss": "actor_loss",
    "actor_gradient_l2": "actor_gradient_norm",
}
"""Recorded name -> ours."""


class Recorded:
    """One recorded run, as the actors take it."""

    def __init__(self, path: Path) -> None:
        self.case: dict[str, Any] = json.loads(path.read_text())
        self.networks = shapes(self.case)
        self.name = path.stem

    def worker_spec(self) -> WorkerSpec:
        case = self.case
        return WorkerSpec(
            networks=self.networks,
            rules=DDPGRules(case["gamma"], case["lr"], case["lr"]),
            tau=case["tau"],
            batch_size=case["batch"],
            learning_starts=1,
            target_sync_interval=case["sync_every"],
            replay_capacity=1,
            shared_replay=False,
            seed=0,
            float64=True,
        )

    def coordinator_spec(self) -> CoordinatorSpec:
        return CoordinatorSpec(self.networks, self.case["tau"], "random", True, 0, None, float64=True)

    def rows(self, when: str, name: str) -> np.ndarray:
        shape = self.networks.actor if name.startswith("actor") else self.networks.critic
        return rows(shape, self.case[when][name]).numpy()

    def centre(self, when: str) -> Rows:
        return (
            row(self.networks.actor, self.case[when]["central_actor"]),
            row(self.networks.critic, self.case[when]["central_critic"]),
        )


RECORDED = [Recorded(path) for path in CASES]


@pytest.fixture
def actors(ray_cluster: None) -> Iterator[list[Any]]:
    """Put every actor in here that has to end with the test."""
    started: list[Any] = []
    yield started
    for actor in started:
        ray.kill(actor)


def start_worker(recorded: Recorded, span: slice) -> Any:
    """A worker of some agents that stand where the recorded run began."""

    def rows(name: str) -> np.ndarray:
        return recorded.rows("initial", name)[span]

    # Targets start as copies of the first rows, and stay when the centre sends others.
    worker = (
        ray.remote(DDPGWorker)
        .options(num_cpus=0)
        .remote(
            recorded.worker_spec(),
            range(span.start, span.stop),
            rows("actor_target"),
            rows("critic_target"),
        )
    )
    worker.number_from.remote(span.start)
    worker.pull.remote(rows("actor"), rows("critic"))
    return worker


def start_coordinator(recorded: Recorded) -> Any:
    coordinator = ray.remote(SMARLCoordinator).options(num_cpus=0)
    handle = coordinator.remote(recorded.coordinator_spec(), recorded.case["agents"])
    handle.set_centre.remote(*recorded.centre("initial"))
    return handle


def assert_near(ours: np.ndarray, theirs: Any, name: str) -> None:
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("recorded", "split"),
    [
        pytest.param(recorded, split, id=f"{recorded.name} split {split}")
        for recorded in RECORDED
        for split in SPLITS[recorded.case["agents"]]
    ],
)
def test_the_recorded_run_is_reproduced(actors: list[Any], recorded: Recorded, split: list[int]) -> None:
    case = recorded.case
    spans = [slice(sum(split[:k]), sum(split[: k + 1])) for k in range(len(split))]
    workers = [start_worker(recorded, span) for span in spans]
    coordinator = start_coordinator(recorded)
    actors += [*workers, coordinator]
    # In whatever order parameters arrive, the last one first to begin with.
    arrivals = cycle(list(permutations(range(len(workers))))[::-1])
    for step in case["steps"]:
        due = step["step"] % case["sync_every"] == 0
        answers = [
            worker.learn_from.options(num_returns=3).remote(
                batch_of(step["agents"][span]), update_targets=due
            )
            for worker, span in zip(workers, spans, strict=True)
        ]
        for (stats, *_), span in zip(answers, spans, strict=True):
            measured = ray.get(stats)
            for theirs, ours in STATS.items():
                expected = [agent[theirs] for agent in step["agents"][span]]
                assert_near(getattr(measured, ours).numpy(), expected, f"{ours} of step {step['step']}")
        if due:
            pushes = next(arrivals)
            refs = [ref for k in pushes for ref in answers[k][1:]]
            sync = coordinator.sync.options(num_returns=3 + len(refs))
            back = sync.remote([spans[k].start for k in pushes], *refs)[3:]
            for place, k in enumerate(pushes):
                workers[k].pull.remote(*back[2 * place : 2 * place + 2])
    states = ray.get([worker.state.remote() for worker in workers])
    for name in ("actor", "critic", "actor_target", "critic_target"):
        ours = np.concatenate([state[name] for state in states])
        assert_near(ours, recorded.rows("final", name), name)
    for ours, theirs in zip(ray.get(coordinator.centre.remote()), recorded.centre("final"), strict=True):
        assert_near(ours, theirs, "centre")


def test_every_recorded_run_is_replayed() -> None:
    assert len(RECORDED) == 3
