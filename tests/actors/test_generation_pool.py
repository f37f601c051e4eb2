"""One agent's workers as real Ray actors: sharing prompts, pushing weights, and coming back from the dead."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from actors.engine import Sampling
from actors.generation_group import GenerationGroup
from actors.generation_pool import GenerationPool, WeightSource
from actors.generation_worker import EngineSpec, PromptTooLongError
from actors.limits import WaitLimitError
from learners.learner_actors import LearnerSpec, PolicyLearner, PolicySpec

pytestmark = pytest.mark.ray

PROMPTS = ["def add(a, b):", "the quick brown fox", "is this a prompt?", "x", "lazy dog"]
SEEDS = [11, 12, 13, 14, 15]
SAMPLING = Sampling(max_new_tokens=12, temperature=0.8, top_p=0.95)
PROBE = np.arange(5, 20, dtype=np.int32)


@pytest.fixture(scope="module")
def snapshots(ray_cluster: None, small_model: Path, other_model: Path) -> tuple[WeightSource, WeightSource]:
    """Versions 1 and 2 of a policy: the second has other weights."""
    spec = LearnerSpec(str(small_model), learning_rate=1e-2, device="cpu")
    learner = PolicyLearner(PolicySpec(spec, agent_idx=0))
    first = learner.snapshot(1, PROBE)
    first.tensors = {name: (tag, array.copy()) for name, (tag, array) in first.tensors.items()}
    for parameter in learner._policy.model.parameters():
        parameter.data.mul_(1.2)
    references = ray.put(first), ray.put(learner.snapshot(2, PROBE))
    return tuple(lambda engines, incarnation, own=each: own for each in references)


@pytest.fixture(scope="module")
def pool(ray_cluster: None, small_model: Path) -> Iterator[GenerationPool]:
    # The transformers engine: what is tested here is the same for every engine, and it starts fastest.
    spec = EngineSpec("transformers", str(small_model), str(small_model))
    pool = GenerationPool(0, spec, [{"num_cpus": 0.1}] * 2, start_timeout_s=120, generate_timeout_s=60)
    pool.wait_ready()
    yield pool
    pool.shutdown()


def sample(pool: GenerationPool) -> list[list[int]]:
    return [c.token_ids.tolist() for c in pool.gather(pool.submit(PROMPTS, SAMPLING, SEEDS))]


def kill_process(pool: GenerationPool, index: int) -> None:
    pid = ray.get(pool.workers[index].ready.remote())["pid"]
    os.kill(pid, signal.SIGKILL)


def test_replicas_share_prompts_and_answer_in_order(
    pool: GenerationPool, snapshots: tuple[WeightSource, WeightSource]
) -> None:
    pool.confirm(pool.push(snapshots[0], 1, verify=True))
    pending = pool.submit(PROMPTS, SAMPLING, SEEDS)
    assert [(s.start, s.stop) for s in pending.shards] == [(0, 2), (2, 5)]
    shared = pool.gather(pending)
    alone = [
        pool.gather(pool.submit([prompt], SAMPLING, [seed]))[0]
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    assert [c.token_ids.tolist() for c in shared] == [c.token_ids.tolist() for c in alone]
    assert {c.weight_version for c in shared} == {1}


def test_a_worker_killed_while_it_generates_is_replaced_with_current_weights(
    pool: GenerationPool, snapshots: tuple[WeightSource, WeightSource]
) -> None:
    pool.confirm(pool.push(snapshots[0], 1, verify=True))
    old = sample(pool)
    pool.confirm(pool.push(snapshots[1], 2, verify=True))
    expected = sample(pool)
    assert expected != old
    recovered = pool.recoveries
    kill_process(pool, 1)
    assert sample(pool) == expected
    assert pool.recoveries > recovered


def test_a_worker_killed_between_calls_is_noticed_at_the_next_push(
    pool: GenerationPool, snapshots: tuple[WeightSource, WeightSource]
) -> None:
    kill_process(pool, 0)
    time.sleep(0.5)
    pool.confirm(pool.push(snapshots[0], 1, verify=True))
    completions = pool.gather(pool.submit(PROMPTS, SAMPLING, SEEDS))
    assert {c.weight_version for c in completions} == {1}


def test_a_worker_that_hangs_is_replaced_and_its_prompts_sampled_again(
    pool: GenerationPool, snapshots: tuple[WeightSource, WeightSource]
) -> None:
    pool.confirm(pool.push(snapshots[0], 1, verify=True))
    expected = sample(pool)
    pid = ray.get(pool.workers[0].ready.remote())["pid"]
    os.kill(pid, signal.SIGSTOP)
    limit, pool._generate_timeout_s = pool._generate_timeout_s, 5
    try:
        assert sample(pool) == expected
    finally:
        pool._generate_timeout_s = limit


def test_more_or_fewer_workers_sample_the_same_with_the_present_weights(
    ray_cluster: None, small_model: Path, snapshots: tuple[WeightSource, WeightSource]
) -> None:
    spec = EngineSpec("transformers", str(small_model), str(small_model))
    options = {"num_cpus": 0.1}
    pool = GenerationPool(0, spec, [options], start_timeout_s=120, generate_timeout_s=60)
    try:
        pool.wait_ready()
        pool.confirm(pool.push(snapshots[1], 2, verify=True))
        expected = sample(pool)
        pool.resize([options] * 3)
        assert len(pool.workers) == 3
        assert sample(pool) == expected
        ended = pool.workers[1]
        pool.resize([options])
        assert sample(pool) == expected
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(ended.ready.remote(), timeout=30)
        pool._start_timeout_s = 0.01
        with pytest.raises(WaitLimitError, match="the engine to start of generation worker 1"):
            pool.resize([options] * 2)
        assert len(pool.workers) == 1
        assert sample(pool) == expected
    finally:
        pool.shutdown()


def test_a_worker_beyond_the_planned_ones_is_let_go_when_it_is_lost_and_no_completion_with_it(
    ray_cluster: None,
    small_model: Path,
    snapshots: tuple[WeightSource, WeightSource],
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = EngineSpec("transformers", str(small_model), str(small_model))
    options = {"num_cpus": 0.1}
    pool = GenerationPool(0, spec, [options], start_timeout_s=120, generate_timeout_s=60)
    try:
        pool.wait_ready()
        pool.resize([options] * 2)
        pool.confirm(pool.push(snapshots[0], 1, verify=True))
        expected = sample(pool)
        kill_process(pool, 1)
        assert sample(pool) == expected
        assert len(pool.workers) == 1
        pool.resize([options] * 2)
        assert sample(pool) == expected
        kill_process(pool, 1)
        assert pool.confirm(pool.push(snapshots[1], 2, verify=True)) < 1e-3
        assert len(pool.workers) == 1
        pool.resize([options] * 2)
        after = sample(pool)
        kill_process(pool, 0)  # the planned one comes back, the other one stays
        assert sample(pool) == after != expected
        assert (len(pool.workers), pool.recoveries) == (2, 1)
    finally:
        pool.shutdown()
    lost = [text for text in caplog.messages if "going on with 1" in text]
    assert len(lost) == 2
    assert all(text.startswith("generation worker 1 of agent 0 was lost") for text in lost)


def test_a_wait_that_passes_its_limit_says_what_it_waited_for(ray_cluster: None, small_model: Path) -> None:
    spec = EngineSpec("transformers", str(small_model), str(small_model))
    pool = GenerationPool(3, spec, [{"num_cpus": 0.1}], start_timeout_s=0.01, generate_timeout_s=60)
    with pytest.raises(
        WaitLimitError, match=r"0\.01 s for the engine to start of generation worker 0, agent 3"
    ):
        pool.wait_ready()
    pool.shutdown()


def test_a_prompt_that_does_not_fit_is_named_by_agent_and_position(
    pool: GenerationPool, snapshots: tuple[WeightSource, WeightSource]
) -> None:
    pool.confirm(pool.push(snapshots[0], 1, verify=True))
    group = GenerationGroup([pool])
    with pytest.raises(PromptTooLongError) as caught:
        group.generate([[*PROMPTS, "word " * 400]], [[*SEEDS, 1]], SAMPLING)
    assert (caught.value.agent_idx, caught.value.position) == (0, 5)


def test_group_counts_tokens_and_prompts(
    pool: GenerationPool, snapshots: tuple[WeightSource, WeightSource]
) -> None:
    pool.confirm(pool.push(snapshots[0], 1, verify=True))
    group = GenerationGroup([pool])
    (completions,) = group.generate([PROMPTS], [SEEDS], SAMPLING)
    stats = group.take_stats()
    assert stats.prompts == len(PROMPTS)
    assert stats.tokens == sum(len(c.token_ids) for c in completions)
    assert 0 <= stats.wait_seconds <= stats.seconds
    assert group.take_stats().tokens == 0
