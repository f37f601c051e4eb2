"""Adapters: what is merged, what trains, what is saved, against arithmetic by hand and plain autograd."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.torch import load_file
from test_policy import ADVANTAGES, MINIBATCHES, train
from test_policy_update import CLIP, COEF, TARGETS, assert_models_close, plain_update
from tiny_models import bits_of, causal_lm, mixed_batch
from transformers import AutoModelForCausalLM

from learners.lora import LoraAdapter, LoraSpec
from learners.policy import ADAPTER_FOLDER, Policy
from learners.value_head import ValueHead

SPEC = LoraSpec(rank=3, alpha=12.0)


def policy(model: Any = None, *, spec: LoraSpec = SPEC, seed: int = 5, **options: Any) -> Policy:
    model = causal_lm() if model is None else model
    adapter = LoraAdapter(model, spec, seed=seed)
    return Policy(model, adapter=adapter, **{"learning_rate": 1e-2, **options})


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_are_w_plus_alpha_over_rank_b_a(architecture: str, tied: bool, tmp_path: Path) -> None:
    base = causal_lm(architecture, dtype=torch.float32, tied=tied)
    expected = {name: p.detach().double() for name, p in copy.deepcopy(base).named_parameters()}
    subject = policy(base)
    train(subject)
    before = bits_of(subject.state_dict())
    weights = subject.weights()
    subject.save_pretrained(tmp_path)
    assert bits_of(subject.state_dict()) == before, "merging touches nothing that trains"

    adapters = load_file(tmp_path / ADAPTER_FOLDER / "adapter_model.safetensors")
    changed = set()
    for name, b in adapters.items():
        if name.endswith("lora_B.weight"):
            a = adapters[name.replace("lora_B", "lora_A")]
            delta = 4.0 * b.double() @ a.double()  # alpha / rank
            target = name.removeprefix("base_model.model.").replace(".lora_B", "")
            expected[target] += delta.T if architecture == "gpt2" else delta
            changed.add(target)
    assert len(changed) == {"qwen2": 14, "llama": 14, "gpt2": 8}[architecture], (
        "two layers, each linear layer"
    )
    assert set(weights) == set(expected)
    for name, (tag, array) in weights.items():
        assert tag == "float32"
        assert_allclose(array, expected[name].numpy(), rtol=0, atol=1e-6, err_msg=name)

    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, parameter in saved.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), weights[name][1]), name


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
def test_an_update_equals_plain_autograd_on_the_adapters(architecture: str) -> None:
    subject = policy(causal_lm(architecture))
    train(subject)  # B is 0 at first, and A would get no gradient
    expected = copy.deepcopy(subject.model)
    frozen = bits_of({n: p for n, p in subject.model.named_parameters() if not p.requires_grad})
    subject = Policy(subject.model, adapter=subject._adapter, learning_rate=1e-2)  # without moments
    losses, _ = plain_update(expected, None, "v", None)
    update = subject.update(mixed_batch(), ADVANTAGES, MINIBATCHES)
    assert_allclose(update.actor_loss, losses, rtol=1e-5, atol=1e-5)
    assert_models_close(subject.model, expected)
    assert bits_of({n: p for n, p in subject.model.named_parameters() if not p.requires_grad}) == frozen
    moments = subject.state_dict()["optimiser"]["adamw"]["state"]
    assert len(moments) == sum(p.requires_grad for p in subject.model.parameters())


def test_a_value_head_learns_beside_the_adapters() -> None:
    head = ValueHead(16, 6, seed=2).double()
    subject = policy(value_head=head, value_mode="q", value_clip_range=CLIP, value_loss_coef=COEF)
    old_values = subject.score(mixed_batch()).values
    expected, expected_head = copy.deepcopy(subject.model), copy.deepcopy(head)
    plain_update(expected, expected_head, "q", old_values)
    subject.update(mixed_batch(), ADVANTAGES, MINIBATCHES, td_targets=TARGETS, old_values=old_values)
    assert_models_close(subject.model, expected)
    assert_models_close(head, expected_head)


def test_the_reference_is_the_model_without_its_adapters() -> None:
    model = causal_lm()
    subject = policy(model, reference=model)
    first = subject.score(mixed_batch())
    assert first.reference_kl is not None
    assert np.array_equal(first.reference_kl, np.zeros(7)), "adapters add nothing before their first step"
    train(subject)
    apart = Policy(copy.deepcopy(model), reference=causal_lm(), learning_rate=0)
    ours, theirs = subject.score(mixed_batch()).reference_kl, apart.score(mixed_batch()).reference_kl
    assert ours is not None
    assert theirs is not None
    assert ours.max() > 1e-3
    assert_allclose(ours, theirs, atol=1e-9)
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_head", [False, True])
def test_a_resumed_adapter_continues_bit_for_bit(dtype: torch.dtype, with_head: bool) -> None:
    def fresh(seed: int) -> Policy:
        head = ValueHead(16, seed=seed) if with_head else None
        return policy(causal_lm(dtype=dtype), seed=seed, value_head=head)

    first, second = fresh(0), fresh(1)
    train(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    train(first)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    train(second)
    assert bits_of(second.state_dict()) == bits_of(first.state_dict())
    assert bits_of(dict(second.model.named_parameters())) == bits_of(dict(first.model.named_parameters()))
    assert set(second.state_dict()["model"]) == {n for n, _ in first.model.named_parameters() if "lora_" in n}


def test_adapters_beside_half_precision_weights_are_float32_and_merge_in_it() -> None:
    base = causal_lm(dtype=torch.bfloat16)
    before = {name: p.detach().float() for name, p in base.named_parameters()}
    subject = policy(base, learning_rate=1e-3)
    train(subject)
    assert {p.dtype for p in subject.model.parameters() if p.requires_grad} == {torch.float32}
    merged = {
        name: torch.from_numpy(array.copy()).view(torch.bfloat16)
        for name, (_, array) in subject.weights().items()
    }
    assert all(tensor.dtype == torch.bfloat16 for tensor in merged.values())
    assert any((merged[name].float() != before[name]).any() for name in merged)


def test_the_same_seed_makes_the_same_adapters_and_leaves_global_randomness_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    model = causal_lm()
    torch.manual_seed(1)
    one = policy(model, seed=3)
    assert torch.equal(torch.rand(1), expected)
    other, another = policy(seed=3), policy(seed=4)
    assert bits_of(one.state_dict()["model"]) == bits_of(other.state_dict()["model"])
    assert bits_of(one.state_dict()["model"]) != bits_of(another.state_dict()["model"])


def test_only_the_named_layers_get_adapters() -> None:
    subject = policy(spec=LoraSpec(2, 2.0, ("q_proj", "v_proj")))
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in subject.state_dict()["model"]}
    assert adapted == {"q_proj", "v_proj"}


def test_a_tied_output_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LoRA cannot adapt lm_head\.weight: it is tied"):
        policy(spec=LoraSpec(2, 2.0, ("lm_head",)))


def test_a_state_of_another_kind_of_training_is_refused() -> None:
    full = Policy(causal_lm(), learning_rate=1e-2)
    with pytest.raises(ValueError, match=r"is `lora` as it was"):
        full.load_state_dict(policy().state_dict())
    with pytest.raises(ValueError, match=r"is `lora` as it was"):
        policy().load_state_dict(full.state_dict())


def test_gradient_checkpointing_changes_no_number_of_adapters() -> None:
    def run(checkpointing: bool) -> Any:
        subject = policy(causal_lm("gpt2"), gradient_checkpointing=checkpointing)
        train(subject)
        return bits_of(subject.state_dict())

    assert run(True) == run(False)
