"""Whole runs with real Ray actors and real engines: they learn, resume bit for bit, survive, and fail with grace."""

from __future__ import annotations

import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from callbacks_for_training import follow, letters, letters_per_agent, number_of_samples, share
from language_runs import (
    LEARN,
    ROWS,
    VLLM,
    assert_same_run,
    metrics_of,
    rollouts_of,
    weights_of,
)
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from actors.rewards import CallbackError
from learners.optimiser import NonFiniteLossError
from services.bundles import PlacementError
from services.checkpoint import CheckpointStore, TrainerState

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


LEARNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "maac": ("maac", {}),
    "iac": ("iac", {}),
    "iac_shared": ("iac", {"use_separate_critic": False}),
}
QUICK = [("maac", 2, "v"), ("iac", 1, "q"), ("iac_shared", 2, "q")]


@pytest.mark.parametrize(
    ("learner", "num_turns", "critic_type"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow, id="-".join(map(str, each)))
        for each in product(LEARNERS, [1, 2], ["v", "q"])
    ],
)
def test_it_learns(make: Any, learner: str, num_turns: int, critic_type: str) -> None:
    algorithm, own = LEARNERS[learner]
    shape = {"num_turns": num_turns, "num_generations": 1 if num_turns == 2 else 4}
    trainer = make(
        algorithm,
        {**LEARN, **own, **shape, "critic_type": critic_type},
        external_transition=follow if num_turns == 2 else None,
    )
    run = trainer.train()
    logs = metrics_of(run)
    tenth = max(1, len(logs) // 10)
    for turn in range(1, num_turns + 1):
        rewards = [log[f"turn_{turn}/reward_mean"] for log in logs]
        assert np.mean(rewards[-tenth:]) > np.mean(rewards[:tenth]) + 0.15
    assert max(log["logprob_gap_max"] for log in logs) < 1e-3
    assert all(np.isfinite(value) for log in logs for value in log.values())
    agents = [weights_of(run / "final" / f"agent_{i}") for i in range(2)]
    assert not torch.equal(*(w["model.safetensors:model.embed_tokens.weight"] for w in agents)), (
        "agents train apart"
    )


@pytest.mark.vllm
@pytest.mark.parametrize("stop_after", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(
    make: Any, tmp_path: Path, stop_after: int
) -> None:
    args = {
        **LEARN, "num_train_epochs": 2, "num_turns": 2, "rollout_buffer_size": 10, "train_batch_size": 4,
        "early_termination_threshold": 0.5, "logging_steps": 15, "eval_interval": 5, "eval_num_samples": 2,
    }  # fmt: skip
    options = {
        "external_transition": follow,
        "engine": VLLM,
        "eval_dataset": ROWS[:3],
        "metrics_callback": number_of_samples,
    }
    whole = make("maac", args, run_name="whole", **options)
    whole.train()
    whole.shutdown()
    first = make("maac", args, run_name="parts", **options)
    first.train(max_updates=stop_after)
    first.shutdown()
    second = make("maac", args, **options)
    second.train(resume_from=tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert len({r["round"] for r in rollouts_of(tmp_path / "whole")}) > stop_after + 1
    assert any("eval/turn_1/reward_mean" in log for log in metrics_of(tmp_path / "whole"))


@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_whose_reward_raises_keeps_what_it_has_and_goes_on_once_mended(
    make: Any, tmp_path: Path
) -> None:
    args = {**LEARN, "num_train_epochs": 1, "num_turns": 1, "num_generations": 4, "rollout_buffer_size": 16}
    make("iac", args, run_name="whole").train()
    calls = 0

    def fails_at_the_seventh_item(first: list[str], second: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise RuntimeError("judge is away")
        return letters(first, second)

    broken = make("iac", args, run_name="parts", reward_func=fails_at_the_seventh_item)
    with pytest.raises(CallbackError, match=r"on item 6 raised RuntimeError: judge is away") as caught:
        broken.train()
    assert any(
        "1 finished update rounds are in" in note and "--resume" in note for note in caught.value.__notes__
    )
    broken.shutdown()
    make("iac", args).train(resume_from=tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_batched_collection_trains_exactly_as_one_item_at_a_time(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {
        **LEARN, "num_train_epochs": 2, "num_turns": 2, "rollout_buffer_size": 7, "early_termination_threshold": 0.45,
    }  # fmt: skip
    options = {"external_transition": follow, "reward_func": letters_per_agent}
    make("maac", args, run_name="batched", **options).train()
    monkeypatch.setattr("services.round_collection.items_that_fit", lambda missing, turns, generations: 1)
    make("maac", args, run_name="single", **options).train()
    batched, single = rollouts_of(tmp_path / "batched"), rollouts_of(tmp_path / "single")
    turns = {(r["item_idx"], r["epoch"]): 0 for r in batched}
    for r in batched:
        turns[r["item_idx"], r["epoch"]] = max(turns[r["item_idx"], r["epoch"]], r["turn_idx"] + 1)
    assert set(turns.values()) == {1, 2}, "some items must end early and some not"
    exact = (
        "round",
        "epoch",
        "item_idx",
        "turn_idx",
        "agent_idx",
        "prompt",
        "completion",
        "reward",
        "weight_version",
    )
    assert [[r[n] for n in exact] for r in batched] == [[r[n] for n in exact] for r in single]
    for name in ("value", "td_target", "td_error", "advantage", "engine_logprob"):
        np.testing.assert_allclose([r[name] for r in batched], [r[name] for r in single], atol=2e-4)
    weights, others = weights_of(tmp_path / "batched" / "final"), weights_of(tmp_path / "single" / "final")
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], atol=1e-4, rtol=1e-3)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_killed_worker_does_not_change_the_run(make: Any, tmp_path: Path) -> None:
    args = {**LEARN, "num_train_epochs": 1, "num_turns": 1, "num_generations": 2, "rollout_buffer_size": 8}
    engine = {**VLLM, "workers_per_agent": 2}
    whole = make("maac", args, run_name="whole", engine=engine)
    whole.train()
    whole.shutdown()
    calls = 0

    def kills_a_worker(first: list[str], second: list[str]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 6:
            (pid,) = {
                ray.get(pool.workers[1].ready.remote())["pid"] for pool in hurt._system.generation.pools[:1]
            }
            os.kill(pid, signal.SIGKILL)
        return letters(first, second)

    hurt = make("maac", args, run_name="hurt", engine=engine, reward_func=kills_a_worker)
    hurt.train()
    assert hurt._system.generation.pools[0].recoveries > 0
    assert_same_run(tmp_path / "whole", tmp_path / "hurt")


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_touched(make: Any, tmp_path: Path) -> None:
    args = {**LEARN, "num_train_epochs": 1, "num_turns": 1, "num_generations": 4, "rollout_buffer_size": 16}
    calls = 0

    def explodes(first: list[str], second: list[str]) -> float:
        nonlocal calls
        calls += 1
        return 3e38 if calls > 4 else 0.5  # finite, but its square is not

    trainer = make("maac", args, reward_func=explodes, run_name="run")
    with pytest.raises(NonFiniteLossError, match="critic 0"):
        trainer.train()
    store = CheckpointStore(tmp_path / "run" / "checkpoints", None)
    latest = store.latest()
    assert latest is not None
    assert "NonFiniteLossError" in store.read_state(latest, TrainerState).reason
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(latest).values())


def test_models_are_saved_where_others_can_load_them(make: Any, tmp_path: Path) -> None:
    args = {**LEARN, "num_train_epochs": 1, "num_turns": 1, "num_generations": 2}
    run = make("iac", args, reward_func=letters).train()
    for i in range(2):
        model = AutoModelForCausalLM.from_pretrained(run / "final" / f"agent_{i}")
        tokenizer = AutoTokenizer.from_pretrained(run / "final" / f"agent_{i}")
        assert model(**tokenizer("def", return_tensors="pt")).logits.shape[-1] == len(tokenizer)
        AutoModel.from_pretrained(run / "final" / f"agent_{i}" / "critic")
        assert (run / "final" / f"agent_{i}" / "critic" / "value_head.safetensors").is_file()
    assert not list((run / "final").rglob("training_state.pt"))


def test_different_models_and_tokenizers_work_together(
    make: Any, small_model: Path, other_model: Path
) -> None:
    args = {**LEARN, "num_train_epochs": 1, "num_turns": 1, "num_generations": 2, "rollout_buffer_size": 8}
    models = [AutoModelForCausalLM.from_pretrained(small_model), str(other_model)]
    tokenizers = [AutoTokenizer.from_pretrained(small_model), str(other_model)]
    trainer = make(
        "iac", args, agent_model=None, agents=models, tokenizer=tokenizers, critic_model=None,
        critics=[str(small_model), str(other_model)],
    )  # fmt: skip
    run = trainer.train()
    sizes = [
        AutoModelForCausalLM.from_pretrained(run / "final" / f"agent_{i}").config.vocab_size for i in range(2)
    ]
    assert sizes[0] != sizes[1]


@pytest.mark.slow
def test_one_critic_object_for_several_agents_is_one_critic(make: Any, small_model: Path) -> None:
    args = {**LEARN, "num_train_epochs": 1, "num_turns": 1, "num_generations": 2, "rollout_buffer_size": 8}
    shared = AutoModel.from_pretrained(small_model)
    trainer = make("iac", args, critic_model=shared)
    run = trainer.train()
    assert list(trainer._system.learners.critics) == [0]
    assert (run / "final" / "agent_0" / "critic").is_dir()
    assert not (run / "final" / "agent_1" / "critic").exists()
    trainer.shutdown()
    apart = make("iac", args)
    apart.train()
    assert list(apart._system.learners.critics) == [0, 1]


def test_a_single_independent_agent_with_a_reference(make: Any, tmp_path: Path) -> None:
    args = {
        **LEARN, "num_agents": 1, "num_train_epochs": 2, "num_turns": 1, "num_generations": 4,
        "reference_kl_enabled": True, "reference_kl_coef": 0.5,
    }  # fmt: skip
    trainer = make("iac", args, reward_func=lambda answers: [share(a) for a in answers])
    run = trainer.train()
    logs = metrics_of(run)
    assert logs[0]["turn_1/reference_kl_mean"] == pytest.approx(0, abs=1e-5)
    assert logs[-1]["turn_1/reference_kl_mean"] > 0
    assert logs[-1]["turn_1/reference_kl_penalty_mean"] == pytest.approx(
        0.5 * logs[-1]["turn_1/reference_kl_mean"]
    )
    last = rollouts_of(run)[-1]
    assert last["td_target"] == pytest.approx(last["reward"] - 0.5 * last["reference_kl"], abs=1e-5)
    assert (run / "final" / "model.safetensors").is_file()
    assert (run / "final" / "critic" / "value_head.safetensors").is_file()


def test_evaluate_and_save_without_training(make: Any, tmp_path: Path) -> None:
    trainer = make(
        "maac", {"num_turns": 1, "eval_num_samples": 3}, eval_dataset=ROWS, metrics_callback=number_of_samples
    )
    metrics = trainer.evaluate()
    assert set(metrics) == {"eval/turn_1/reward_mean", "eval/turn_1/expected_return", "eval/samples"}
    assert metrics == trainer.evaluate()
    trainer.save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "agent_1" / "tokenizer.json").is_file()
    assert (tmp_path / "saved" / "critic" / "value_head.safetensors").is_file()


def test_a_run_that_finds_no_room_leaves_its_name_free(make: Any, tmp_path: Path) -> None:
    trainer = make("maac", {"num_turns": 1}, run_name="run", placement={"cpus_per_learner": 1000})
    for _ in range(2):
        with pytest.raises(PlacementError, match="cannot hold the run: 3002 CPU needed"):
            trainer.train()
        assert not (tmp_path / "run").exists()
