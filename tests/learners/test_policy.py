"""Scores, weights, checkpoints and files of a policy."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from tiny_models import (
    bits_of,
    causal_lm,
    mixed_batch,
    plain_forward,
    plain_token_logprobs,
)
from transformers import AutoModelForCausalLM

from learners.models import frozen_copy, hidden_size_of, load_causal_lm
from learners.policy import VALUE_HEAD_FOLDER, Policy
from learners.samples import TokenBatch
from learners.value_head import ValueHead

MINIBATCHES = [[0, 3, 5], [1, 2], [6, 4]]
ADVANTAGES = np.array([0.5, -1.0, 2.0, 1.5, -0.25, 0.75, -2.0], dtype=np.float32)
TARGETS = np.array([0.1, 0.9, -0.4, 0.3, 0.2, -0.7, 0.6], dtype=np.float32)


def policy(**options: Any) -> Policy:
    model = options.pop("model", None) or causal_lm()
    return Policy(model, **{"learning_rate": 1e-2, **options})


def train(subject: Policy) -> None:
    extra: Any = {}
    if subject.value_head is not None:
        extra = {"td_targets": TARGETS, "old_values": subject.score(mixed_batch()).values}
    subject.update(mixed_batch(), ADVANTAGES, MINIBATCHES, **extra)


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("tokens", [1, 30, 10_000])
def test_scores_equal_those_of_one_sample_at_a_time(architecture: str, tokens: int) -> None:
    model, reference = causal_lm(architecture), causal_lm(architecture, seed=1)
    batch = mixed_batch()
    scores = policy(model=model, reference=reference, micro_batch_tokens=tokens).score(batch)
    assert scores.logprob.dtype == np.float64
    assert scores.values is None
    assert scores.reference_kl is not None
    with torch.no_grad():
        for i, (prompt, completion) in enumerate(zip(batch.prompt_ids, batch.completion_ids, strict=True)):
            ours = plain_token_logprobs(model, prompt, completion)
            gap = plain_token_logprobs(reference, prompt, completion) - ours
            assert_allclose(scores.logprob[i], ours.sum(), atol=1e-5)
            assert_allclose(scores.reference_kl[i], (gap.exp() - gap - 1).sum(), atol=1e-5)
            everything, _ = plain_forward(model, prompt, completion)
            entropy = -(everything.exp() * everything).sum(-1)
            assert_allclose(scores.entropy[i], entropy.mean() if len(completion) else 0.0, atol=1e-6)
    assert scores.logprob[3] == scores.reference_kl[3] == 0.0, "an empty completion"


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2"])
@pytest.mark.parametrize("mode", ["v", "q"])
def test_the_value_head_reads_the_last_prompt_or_completion_token(architecture: str, mode: Any) -> None:
    model, batch = causal_lm(architecture), mixed_batch()
    head = ValueHead(hidden_size_of(model), 8).double()
    scores = policy(model=model, value_head=head, value_mode=mode, micro_batch_tokens=40).score(batch)
    assert scores.values is not None
    with torch.no_grad():
        for i, (prompt, completion) in enumerate(zip(batch.prompt_ids, batch.completion_ids, strict=True)):
            _, hidden = plain_forward(model, prompt, completion)
            expected = head(hidden[len(prompt) - 1 if mode == "v" else -1])
            assert_allclose(scores.values[i], expected, rtol=0, atol=1e-6)


def test_a_reference_starts_equal_and_stays_while_the_policy_moves() -> None:
    model = causal_lm()
    reference = frozen_copy(model)
    subject = policy(model=model, reference=reference)
    before = bits_of(reference.state_dict())
    scores = subject.score(mixed_batch())
    assert scores.reference_kl is not None
    assert (scores.reference_kl == 0).all()
    train(subject)
    moved = subject.score(mixed_batch()).reference_kl
    assert moved is not None
    assert (np.delete(moved, 3) > 0).all()
    assert bits_of(reference.state_dict()) == before


def test_an_empty_batch_has_empty_scores() -> None:
    assert policy().score(TokenBatch([], [])).logprob.shape == (0,)


def test_probe_logprobs_are_those_of_the_sequence() -> None:
    model, ids = causal_lm(), mixed_batch().prompt_ids[1]
    probe = policy(model=model).probe_logprobs(ids)
    assert probe.dtype == np.float32
    assert_allclose(probe, plain_token_logprobs(model, ids[:1], ids[1:]).detach(), atol=1e-6)


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_named_as_in_the_model_without_tied_duplicates(architecture: str, tied: bool) -> None:
    model = causal_lm(architecture, dtype=torch.float32, tied=tied)
    weights = policy(model=model).weights()
    expected = model.state_dict()
    assert set(weights) == set(expected) - ({"lm_head.weight"} if tied else set())
    for name, (tag, array) in weights.items():
        assert tag == "float32"
        assert_array_equal(array, expected[name].numpy())


def test_bfloat16_weights_travel_as_their_bits() -> None:
    model = causal_lm(dtype=torch.bfloat16)
    for name, (tag, array) in policy(model=model).weights().items():
        assert tag == "bfloat16"
        assert array.dtype == np.uint16
        assert torch.equal(torch.from_numpy(array.copy()).view(torch.bfloat16), model.state_dict()[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_head", [False, True])
def test_a_resumed_policy_continues_bit_for_bit(dtype: torch.dtype, with_head: bool) -> None:
    def fresh(seed: int) -> Policy:
        model = causal_lm(dtype=dtype, seed=seed)
        return policy(model=model, value_head=ValueHead(16, seed=seed) if with_head else None)

    first = fresh(0)
    train(first)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    train(first)
    file.seek(0)
    second = fresh(1)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.updates_done == 1
    train(second)
    assert bits_of(second.state_dict()) == bits_of(first.state_dict())
    assert second.updates_done == 2


def test_a_state_with_a_value_head_is_refused_by_a_policy_without() -> None:
    state = policy(value_head=ValueHead(16)).state_dict()
    with pytest.raises(ValueError, match="differ in having a value head"):
        policy().load_state_dict(state)


def test_a_saved_policy_is_loaded_by_transformers_with_its_head_below_it(tmp_path: Path) -> None:
    subject = policy(model=causal_lm(dtype=torch.float32), value_head=ValueHead(16, 4))
    train(subject)
    subject.save_pretrained(tmp_path)
    assert subject.value_head is not None
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_causal_lm(str(tmp_path), dtype="float32", attn_implementation="eager")
    for loaded in (plain, ours):
        assert bits_of(loaded.state_dict()) == bits_of(subject.model.state_dict())
    head = ValueHead.load(tmp_path / VALUE_HEAD_FOLDER)
    assert bits_of(head.state_dict()) == bits_of(subject.value_head.state_dict())
    half = load_causal_lm(str(tmp_path), dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_a_built_model_is_used_as_it_is() -> None:
    model = causal_lm()
    assert load_causal_lm(model) is model
