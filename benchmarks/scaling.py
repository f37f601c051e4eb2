"""What orchestration costs: the real training loop, with engines and learners that only wait.

Every engine and learner is replaced by a stand-in that sleeps for a known time and answers with numbers of the right
shape, so that two cores show what is left: prompts, rewards, batches, calls, object store, metrics and logs.  Stand-ins
share processes, whose own work is therefore part of what is measured.

Run `python examples/prepare.py` first, then `python benchmarks/scaling.py [--agents 1 2 4 8 64 128 256]`.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import statistics
import time
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import ray
from transformers import AutoTokenizer

from actors.engine import Sampling
from actors.generation_group import GenerationGroup
from actors.generation_pool import GenerationPool
from actors.generation_worker import EngineSpec
from learners.critic import CriticUpdate
from learners.critic_inputs import CriticLayout, CriticReader
from learners.policy import PolicyUpdate
from learners.ragged import Ragged
from learners.samples import CompletionBatch
from learners.snapshot import WeightSnapshot
from services.checkpoint import CheckpointStore, TrainerState
from services.config import RunConfig, parse_config
from services.launch import System
from services.learner_group import LearnerGroup, UpdateRules
from services.learner_ranks import RankGroup
from services.loop import Recorders, TrainingLoop
from services.metrics import MetricsLogger
from services.progress import Progress
from services.ray_connection import connect
from services.rollout_log import RolloutLog
from services.rollouts import collector_of
from services.round_collection import RoundCollection
from services.run_folder import RunFolder

MODEL = "examples/models/small"
PROMPT_S, START_S, VALUE_S, UPDATE_S, PUSH_S = 0.04, 0.5, 0.5, 2.0, 0.25
"""Known durations: of a prompt, a call of generation, a call for values, an update, and a push."""
TOKENS, GENERATIONS, ITEMS = 64, 8, 8
"""Of a completion; completions of a prompt; items of an update round."""
PROCESSES = 2
"""Of stand-ins, which all agents share: as many as there are cores, for an idle process costs time as well."""


def _completions(count: int, version: int) -> CompletionBatch:
    ids = Ragged.of([np.ones(TOKENS, np.int32)] * count, np.int32)
    logprobs = Ragged.of([np.full(TOKENS, -1.0)] * count, np.float32)
    texts, reasons = ["word " * TOKENS] * count, ["length"] * count
    return CompletionBatch(ids, ids, logprobs, texts, reasons, [False] * count, version)


class StandIn:
    """Engine, policy and critic at once, for any number of agents."""

    def __init__(self) -> None:
        # Answers are made once: what real engines do meanwhile is not what is measured.
        self._completions = functools.cache(_completions)

    async def ready(self) -> dict[str, Any]:
        return {"pid": 0, "context_length": 4096}

    async def generate(
        self, prompts: Sequence[str], sampling: Sampling, seeds: Sequence[int], version: int
    ) -> CompletionBatch:
        await asyncio.sleep(START_S + PROMPT_S * len(prompts))
        return self._completions(len(prompts), version)

    async def push(self, snapshot: WeightSnapshot, verify: bool) -> float:
        await asyncio.sleep(PUSH_S)
        return 0.0

    async def snapshot(self, version: int, probe_ids: Any) -> WeightSnapshot:
        return WeightSnapshot(version, {})

    async def values(self, key: int, texts: Sequence[Any]) -> Any:
        await asyncio.sleep(VALUE_S)
        return np.zeros(len(texts), np.float32)

    async def update_policy(self, batch: Any, *_: Any) -> PolicyUpdate:
        await asyncio.sleep(UPDATE_S)
        return PolicyUpdate([0.0], [], {"grad_norm": 0.0, "entropy": 0.0})

    async def update_critic(self, key: int, targets: Sequence[Any], *_: Any) -> list[CriticUpdate]:
        await asyncio.sleep(UPDATE_S)
        return [CriticUpdate([0.0], {"grad_norm": 0.0, "value": 0.0})] * len(targets)

    async def shutdown(self) -> None:
        return None


class _Role:
    """A stand-in as the learner group knows it: its `update` is a policy's or a critic's."""

    def __init__(self, actor: Any, update: str) -> None:
        self._actor = actor
        self.update = getattr(actor, update)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)


class _Pool(GenerationPool):
    """A pool whose workers are stand-ins that exist already."""

    def __init__(self, agent: int, workers: Sequence[Any]) -> None:
        self._given = iter(workers)
        spec = EngineSpec("transformers", MODEL, MODEL)
        super().__init__(agent, spec, [{}] * len(workers), start_timeout_s=300, generate_timeout_s=300)

    def _start(self, options: dict[str, Any]) -> Any:
        return next(self._given)


def reward(*completions: list[str]) -> list[float]:
    return [0.5] * len(completions[0])


def config_of(agents: int, folder: str) -> RunConfig:
    config = parse_config(
        {
            "algorithm": "maac",
            "agent_model": MODEL,
            "critic_model": MODEL,
            "reward_func": "benchmarks/scaling.py:reward",
            "train_dataset": "examples/data/humaneval.jsonl",
            "output_dir": folder,
            "run_name": f"agents-{agents}",
            "args": {
                "num_agents": agents,
                "num_turns": 1,
                "num_generations": GENERATIONS,
                "rollout_buffer_size": ITEMS * GENERATIONS,
                "early_termination_threshold": None,
                "eval_interval": 0,
            },
        }
    )
    assert isinstance(config, RunConfig)
    return config


def measure(stand_ins: Sequence[Any], agents: int, workers: int, rounds: int, folder: str) -> list[float]:
    """Seconds of each of `rounds` update rounds, after one that warms up."""
    config = config_of(agents, f"{folder}/{workers}")
    args, tokenizer = config.args, AutoTokenizer.from_pretrained(MODEL)

    def stand_in(number: int) -> Any:
        return stand_ins[number % len(stand_ins)]

    pools = [_Pool(a, [stand_in(a * workers + k) for k in range(workers)]) for a in range(agents)]
    reader = CriticReader(CriticLayout("joint", "v", (0,) * agents), tokenizer, [None], False)
    rules = UpdateRules(1.0, True, args.effective_train_batch_size, None, config.seed)
    learners = LearnerGroup(
        [RankGroup(f"agent {a}", [_Role(stand_in(a), "update_policy")]) for a in range(agents)],
        {0: RankGroup("critic", [_Role(stand_ins[0], "update_critic")])},
        reader,
        rules,
        update_timeout_s=300,
    )
    system = System(
        GenerationGroup(pools),
        learners,
        Sampling(TOKENS),
        [tokenizer] * agents,
        None,  # type: ignore[arg-type]
    )
    run = RunFolder.create(config.output_dir, config.run_name, config.algorithm)
    collector = collector_of(
        config, num_generations=GENERATIONS, reward_func=reward, reward_processor=None,
        formatters=[None] * agents, external_transition=None,
    )  # fmt: skip
    rows = [{"prompt": f"Question {k}: " + "word " * TOKENS} for k in range(ITEMS * (rounds + 2))]
    recorders = Recorders(
        MetricsLogger(run, None, resume_step=None),
        RolloutLog(run, resume_round=None),
        CheckpointStore(run.checkpoints, 1),
        Progress(len(rows), 0),
    )
    ends = [time.perf_counter()]
    loop = TrainingLoop(
        config,
        system,
        RoundCollection(args, rows, collector, system.generation, system.generate, None),
        [np.zeros(2, np.int32)] * agents,
        recorders,
        TrainerState(),
        ahead=None,
        save_learners=lambda folder: None,
        metrics_callback=None,
        workers_wanted=lambda: None,
    )
    loop.run(rounds + 1, lambda _: ends.append(time.perf_counter()))
    recorders.close()
    return list(np.diff(ends[1:]))


def known(workers: int) -> float:
    """Seconds that the stand-ins of one update round sleep, one kind after another."""
    prompts = -(-ITEMS * GENERATIONS // workers)
    return START_S + PROMPT_S * prompts + VALUE_S + UPDATE_S + PUSH_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 2, 4, 8, 64, 128, 256])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="per agent, up to 8 agents")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    connect()
    actor = ray.remote(StandIn).options(num_cpus=0, max_concurrency=4096)
    stand_ins = [actor.remote() for _ in range(PROCESSES)]
    ray.get([each.ready.remote() for each in stand_ins], timeout=300)
    print("| agents | workers per agent | joint samples/s | round s | known s | orchestration s | share |")
    print("|---|---|---|---|---|---|---|")
    overheads: dict[int, float] = {}
    with TemporaryDirectory() as folder:
        for agents in arguments.agents:
            for workers in arguments.workers if agents <= 8 else [1]:
                took = statistics.median(measure(stand_ins, agents, workers, arguments.rounds, folder))
                over = took - known(workers)
                overheads.setdefault(agents, over)
                rate = ITEMS * GENERATIONS / took
                print(
                    f"| {agents} | {workers} | {rate:.1f} | {took:.2f} | {known(workers):.2f} | {over:.3f} | "
                    f"{over / took:.1%} |",
                    flush=True,
                )
    counts = sorted(overheads)
    for one, other in itertools.pairwise(counts):
        print(
            f"{one} -> {other} agents: orchestration times {overheads[other] / overheads[one]:.2f}, "
            f"agents times {other / one:g}"
        )


if __name__ == "__main__":
    main()
