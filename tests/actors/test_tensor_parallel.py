"""A vLLM engine that spreads its model over several processes, in a real Ray actor."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from actors.engine import Sampling
from actors.generation_worker import EngineSpec, GenerationWorker
from learners.learner_actors import LearnerSpec, PolicyLearner, PolicySpec
from learners.samples import TokenBatch

pytestmark = [
    pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")
]  # fmt: skip


def test_two_processes_sample_with_pushed_weights_and_end_with_their_worker(small_model: Path) -> None:
    spec = EngineSpec(
        backend="vllm",
        model=str(small_model),
        tokenizer=str(small_model),
        kv_cache_memory_mib=32,
        enforce_eager=True,
        tensor_parallel_size=2,
    )
    worker: Any = ray.remote(num_cpus=1)(GenerationWorker).remote(spec)
    pid = ray.get(worker.ready.remote(), timeout=250)["pid"]
    processes = psutil.Process(pid).children(recursive=True)
    assert sum("Worker_TP" in " ".join(p.cmdline()) for p in processes) == 2

    learner = PolicyLearner(PolicySpec(LearnerSpec(str(small_model), 1e-2, "cpu"), agent_idx=0))
    batch = TokenBatch([np.arange(5, 9, dtype=np.int32)], [np.arange(9, 20, dtype=np.int32)])
    learner.update(batch, [1.0], [[0]], None, None)
    gap = ray.get(worker.push.remote(learner.snapshot(1, np.arange(5, 25, dtype=np.int32)), True), timeout=60)
    assert gap < 1e-3
    (completion,) = ray.get(
        worker.generate.remote(["def add(a, b):"], Sampling(max_new_tokens=8), [1], 1), timeout=60
    ).unpack()
    (score,) = learner.score(TokenBatch([completion.prompt_ids], [completion.token_ids])).logprob
    assert completion.logprobs.sum() == pytest.approx(score, abs=1e-3)

    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 60
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        assert time.monotonic() < end, "the engine's processes outlived their worker"
        time.sleep(0.5)
