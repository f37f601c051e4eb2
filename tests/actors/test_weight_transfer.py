"""Weights that go straight from a learner into vLLM engines, over gloo: real Ray actors, real engines."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from actors import generation_pool
from actors.engine import Sampling
from actors.generation_pool import GenerationPool, WorkerLostError
from actors.generation_worker import EngineSpec
from learners.learner_actors import LearnerSpec, PolicyLearner, PolicySpec
from learners.lora import LoraSpec
from learners.samples import TokenBatch
from learners.snapshot import TransferSpec

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.usefixtures("ray_cluster")]

PROMPTS = ["def add(a, b):", "the quick brown fox", "is this a prompt?"]
SEEDS = [11, 12, 13]
SAMPLING = Sampling(max_new_tokens=10, temperature=0.8, top_p=0.95)
PROBE = np.arange(5, 20, dtype=np.int32)
BATCH = TokenBatch([np.arange(5, 9, dtype=np.int32)], [np.arange(9, 20, dtype=np.int32)])
BUCKET = 20_000  # bytes: the small model takes some


@pytest.fixture(scope="module")
def pool(ray_cluster: None, small_model: Path) -> Iterator[GenerationPool]:
    spec = EngineSpec(
        "vllm", str(small_model), str(small_model), kv_cache_memory_mib=32, enforce_eager=True, weight_transfer="gloo"
    )  # fmt: skip
    pool = GenerationPool(0, spec, [{"num_cpus": 0.1}] * 2, start_timeout_s=200, generate_timeout_s=60)
    pool.wait_ready()
    yield pool
    pool.shutdown()


class Learner:
    """A policy learner as an actor, with what the driver does for a push."""

    def __init__(self, model: Path, **changes: Any) -> None:
        learner = LearnerSpec(str(model), learning_rate=1e-2, device="cpu")
        spec = PolicySpec(learner, agent_idx=0, transfer=TransferSpec("gloo", 1, BUCKET, 60.0), **changes)
        self.actor: Any = ray.remote(num_cpus=0.1)(PolicyLearner).remote(spec)
        ray.get(self.actor.ready.remote(), timeout=120)

    def weights(self, version: int) -> Any:
        return lambda engines, incarnation: self.actor.send.remote(version, PROBE, list(engines), incarnation)

    def update(self) -> None:
        ray.get(self.actor.update.remote(BATCH, [1.0], [[0]], None, None), timeout=60)


@pytest.fixture(scope="module")
def learner(ray_cluster: None, small_model: Path) -> Learner:
    return Learner(small_model)


def push(pool: GenerationPool, learner: Learner, version: int) -> float:
    return pool.confirm(pool.push(learner.weights(version), version, verify=True))


def sample(pool: GenerationPool) -> list[tuple[int, list[int]]]:
    completions = pool.gather(pool.submit(PROMPTS, SAMPLING, SEEDS))
    return [(c.weight_version, c.token_ids.tolist()) for c in completions]


def test_every_engine_computes_with_what_the_learner_sent(pool: GenerationPool, learner: Learner) -> None:
    assert push(pool, learner, 0) < 1e-3
    first = sample(pool)
    for version in (1, 2):  # over the same connection
        learner.update()
        assert push(pool, learner, version) < 1e-3
    second = sample(pool)
    assert {version for version, _ in second} == {2}
    assert [ids for _, ids in first] != [ids for _, ids in second]
    assert pool.recoveries == 0


def test_a_killed_engine_comes_back_with_the_present_weights_and_the_next_push_reaches_all(
    pool: GenerationPool, learner: Learner
) -> None:
    push(pool, learner, 3)
    expected = sample(pool)
    before = pool.recoveries
    os.kill(ray.get(pool.workers[1].ready.remote())["pid"], signal.SIGKILL)
    assert sample(pool) == expected
    assert pool.recoveries == before + 1
    learner.update()
    assert push(pool, learner, 4) < 1e-3
    assert pool.recoveries == before + 1


@pytest.mark.slow
def test_an_engine_that_dies_before_a_push_breaks_it_off_and_all_engines_get_the_weights_anew(
    pool: GenerationPool, learner: Learner
) -> None:
    push(pool, learner, 5)
    expected = [ids for _, ids in sample(pool)]
    os.kill(ray.get(pool.workers[0].ready.remote())["pid"], signal.SIGKILL)
    assert push(pool, learner, 6) < 1e-3
    assert sample(pool) == [(6, ids) for ids in expected]


def test_merged_adapters_arrive(pool: GenerationPool, small_model: Path) -> None:
    adapted = Learner(small_model, lora=LoraSpec(3, 12.0))
    assert push(pool, adapted, 7) < 1e-3
    adapted.update()
    assert push(pool, adapted, 8) < 1e-3


@pytest.mark.slow
def test_two_ranks_send_what_they_hold_together(pool: GenerationPool, small_model: Path) -> None:
    from services.learner_ranks import RankGroup, results_of

    spec = PolicySpec(
        LearnerSpec(str(small_model), learning_rate=1e-2, device="cpu"),
        agent_idx=0,
        transfer=TransferSpec("gloo", 1, BUCKET, 60.0),
    )
    actor: Any = ray.remote(num_cpus=0.1)(PolicyLearner)
    ranks = RankGroup("agent 0", [actor.remote(spec, rank, 2) for rank in range(2)])
    call = ranks.start(120, 120)
    results_of([call], "models", 120, "")
    ranks.started(call)

    def weights(version: int) -> Any:
        return lambda engines, incarnation: (
            ranks.call("send", version, PROBE, list(engines), incarnation).answer
        )

    try:
        for version in (9, 10):
            assert pool.confirm(pool.push(weights(version), version, verify=True)) < 1e-3
            results_of([ranks.call("update", BATCH, [1.0], [[0]], None, None)], "update", 60, "")
        os.kill(ray.get(pool.workers[0].ready.remote())["pid"], signal.SIGKILL)
        assert (
            pool.confirm(pool.push(weights(11), 11, verify=True)) < 1e-3
        )  # the other rank was not left waiting
    finally:
        ranks.end()


@pytest.mark.slow
def test_weights_that_never_arrive_are_told_with_their_cause(
    pool: GenerationPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_pool, "_MAX_RECOVERIES", 1)

    class Nothing:
        def send(self, version: int) -> Any:
            from learners.snapshot import WeightTransferError

            raise WeightTransferError(f"the line of version {version} is dead")

    nothing: Any = ray.remote(num_cpus=0.1)(Nothing).remote()
    with pytest.raises(WorkerLostError, match=r"(?s)could not be started.*the line of version 12 is dead"):
        pool.confirm(pool.push(lambda engines, incarnation: nothing.send.remote(12), 12, verify=True))
