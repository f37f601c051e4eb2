"""Whole runs with what larger models need: adapters, and learners that are several processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from callbacks_for_training import shares
from language_runs import LEARN, ROWS, VLLM, assert_same_run, metrics_of, rollouts_of, weights_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.config import ConfigError
from services.inference import evaluate_run

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

LORA: dict[str, Any] = {"rank": 4, "alpha": 16}


def test_adapters_learn_and_the_saved_agents_are_base_plus_adapter(make: Any, small_model: Path) -> None:
    shape = {"num_turns": 1, "num_generations": 4, "num_train_epochs": 10, "agent_learning_rate": 2e-2}
    run = make("maac", {**LEARN, **shape}, lora=LORA).train()
    logs = metrics_of(run)
    rewards = [log["turn_1/reward_mean"] for log in logs]
    assert rewards[-1] > rewards[0] + 0.15
    assert max(log["logprob_gap_max"] for log in logs) < 1e-3
    base = load_file(small_model / "model.safetensors")
    for agent in ("agent_0", "agent_1"):
        folder = run / "final" / agent
        saved = load_file(folder / "model.safetensors")
        adapters = load_file(folder / "adapter" / "adapter_model.safetensors")
        assert saved.keys() == base.keys()
        for name, weight in saved.items():
            expected = base[name].double()
            b = adapters.get(f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight")
            if b is not None:
                a = adapters[f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"]
                expected = expected + 4.0 * b.double() @ a.double()
                assert not torch.equal(weight, base[name])
            torch.testing.assert_close(weight.double(), expected, rtol=0, atol=1e-6)
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.vllm
@pytest.mark.slow
def test_adapters_are_pushed_into_vllm_and_a_resumed_run_equals_the_uninterrupted_one(
    make: Any, tmp_path: Path
) -> None:
    args = {
        **LEARN, "num_agents": 1, "num_train_epochs": 3, "num_turns": 1, "num_generations": 2,
        "use_separate_critic": False, "reference_kl_enabled": True, "reference_kl_coef": 0.1,
    }  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    options = {"engine": VLLM, "train_dataset": str(rows), "lora": LORA, "reward_func": shares}
    whole = make("iac", args, run_name="whole", **options)
    whole.train()
    whole.shutdown()
    first = make("iac", args, run_name="parts", **options)
    first.train(max_updates=1)
    first.shutdown()
    assert evaluate_run(tmp_path / "parts", num_samples=2).keys() == {
        "eval/turn_1/reward_mean", "eval/turn_1/expected_return"
    }  # fmt: skip
    second = make("iac", args, **options)
    second.train(resume_from=tmp_path / "parts")
    second.shutdown()
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    logs = metrics_of(tmp_path / "whole")
    assert logs[0]["turn_1/reference_kl_mean"] == pytest.approx(0, abs=1e-5)
    assert logs[-1]["turn_1/reference_kl_mean"] > 0
    assert max(log["push_gap_max"] for log in logs) < 1e-3
    assert max(log["logprob_gap_max"] for log in logs) < 1e-3
    state = torch.load(
        next((tmp_path / "parts" / "checkpoints").rglob("training_state.pt")), weights_only=True
    )
    assert all("lora_" in name for name in state["model"]), "the base stays where it came from"


@pytest.mark.slow
def test_learners_of_two_ranks_make_the_run_that_one_rank_makes_and_hand_over_their_checkpoint(
    make: Any, tmp_path: Path
) -> None:
    args = {
        "num_agents": 1, "num_train_epochs": 3, "num_turns": 1, "num_generations": 2, "rollout_buffer_size": 24,
        "agent_learning_rate": 1e-3, "critic_learning_rate": 1e-3,
    }  # fmt: skip
    several = {"ranks_per_policy": 2, "ranks_per_critic": 2}
    make("iac", args, run_name="one", reward_func=shares).train()
    two = make("iac", args, run_name="two", reward_func=shares, learner=several)
    two.train(max_updates=2)
    groups = [*two._system.learners.policies, *two._system.learners.critics.values()]
    assert [len(group.actors) for group in groups] == [2, 2]
    two.shutdown()
    make("iac", args, reward_func=shares).train(resume_from=tmp_path / "two")
    one, other = rollouts_of(tmp_path / "one"), rollouts_of(tmp_path / "two")
    assert [r["completion"] for r in one] == [r["completion"] for r in other]
    for name in ("value", "td_error", "advantage", "engine_logprob"):
        assert [r[name] for r in other] == pytest.approx([r[name] for r in one], abs=2e-4)
    ours, theirs = weights_of(tmp_path / "one" / "final"), weights_of(tmp_path / "two" / "final")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=2e-5)
    assert max(log["push_gap_max"] for log in metrics_of(tmp_path / "two")) < 1e-3


def test_a_model_that_cannot_be_cut_into_so_many_parts_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size: .* its 2 attention heads"):
        make("maac", {"num_turns": 1}, engine={"tensor_parallel_size": 3})


def test_what_does_not_go_with_adapters_is_refused(make: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"it has no linear layers called c_attn; they are called q_proj, k_proj"
    ):
        make("maac", {"num_turns": 1}, lora={"target_modules": ["c_attn", "v_proj"]})
    parallel = {"parallel_training": "mp", "agent_devices": "cpu", "critic_devices": "cpu"}
    reference = {"reference_kl_enabled": True, "reference_devices": "cpu"}
    with pytest.raises(ConfigError, match="lora: needs no reference model"):
        make("maac", {"num_turns": 1, **parallel, **reference}, lora=LORA)
