"""Log-probabilities and entropies of completions equal those of plain one-at-a-time forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from tiny_models import VOCABULARY, causal_lm, mixed_batch, plain_forward, plain_token_logprobs
from torch import Tensor

from learners import causal_forward
from learners.causal_forward import completion_outputs, token_logprobs
from learners.padding import PolicyInputs, pad_policy


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_logprobs_and_hidden_states_equal_those_of_one_unpadded_sample_at_a_time(architecture: str) -> None:
    model, batch = causal_lm(architecture), mixed_batch()
    inputs = pad_policy(batch.prompt_ids, batch.completion_ids)
    with torch.no_grad():
        outputs = completion_outputs(model, inputs, with_hidden=True)
        assert outputs.hidden is not None
        for row, (prompt, completion) in enumerate(zip(batch.prompt_ids, batch.completion_ids, strict=True)):
            logprobs, hidden = plain_forward(model, prompt, completion)
            n = len(completion)
            expected = plain_token_logprobs(model, prompt, completion)
            assert_allclose(outputs.logprobs[row, :n], expected, rtol=0, atol=1e-6)
            assert_allclose(outputs.entropies[row, :n], -(logprobs.exp() * logprobs).sum(-1), atol=1e-6)
            assert (outputs.logprobs[row, n:] == 0).all()
            assert (outputs.entropies[row, n:] == 0).all()
            kept = inputs.attention_mask[row].bool()
            assert_allclose(outputs.hidden[row][kept], hidden, rtol=0, atol=1e-5)


def test_the_head_computes_logits_for_completion_positions_only() -> None:
    model, batch = causal_lm(), mixed_batch()
    inputs = pad_policy(batch.prompt_ids, batch.completion_ids)
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _arguments, output: seen.append(output))
    completion_outputs(model, inputs)
    longest = max(map(len, batch.completion_ids))
    assert [tuple(logits.shape) for logits in seen] == [(len(batch), longest, VOCABULARY)]


def test_a_model_that_cannot_select_positions_gives_the_same_numbers() -> None:
    class AllLogits(torch.nn.Module):
        """A model of the days before `logits_to_keep` and without `position_ids`."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions)

    model, batch = causal_lm(), mixed_batch()
    inputs = pad_policy(batch.prompt_ids, batch.completion_ids)
    expected = completion_outputs(model, inputs).logprobs
    assert_allclose(completion_outputs(AllLogits(model), inputs).logprobs.detach(), expected.detach())


def test_hidden_states_are_kept_only_where_asked_for_and_no_hook_stays_behind() -> None:
    model = causal_lm()
    inputs = pad_policy([mixed_batch().prompt_ids[0]], [mixed_batch().completion_ids[0]])
    assert completion_outputs(model, inputs).hidden is None
    assert completion_outputs(model, inputs, with_hidden=True).hidden is not None
    assert not model.base_model._forward_hooks


def test_the_gradient_of_a_logprob_is_that_of_log_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_forward, "CHUNK_ELEMENTS", 20)  # two rows at a time, so that chunks meet
    logits = torch.randn(2, 4, 9, dtype=torch.float64, generator=torch.manual_seed(1), requires_grad=True)
    targets = torch.randint(9, (2, 4), generator=torch.manual_seed(2))
    weight = torch.randn(2, 4, dtype=torch.float64, generator=torch.manual_seed(3))
    logprobs, entropies = token_logprobs(logits, targets)
    expected = logits.log_softmax(-1)
    picked = expected.gather(-1, targets[..., None]).squeeze(-1)
    assert_allclose(logprobs.detach(), picked.detach(), rtol=1e-13)
    assert_allclose(entropies, -(expected.exp() * expected).sum(-1).detach(), rtol=1e-12)
    assert not entropies.requires_grad
    (ours,) = torch.autograd.grad((logprobs * weight).sum(), logits)
    (theirs,) = torch.autograd.grad((picked * weight).sum(), logits)
    assert_allclose(ours, theirs, rtol=1e-12, atol=1e-15)
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, targets)[0], logits)


@given(st.integers(0, 10_000), st.floats(0.1, 30))
def test_half_precision_logits_are_reduced_in_float32(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(3, 40, generator=generator) * scale).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(40, (3,), generator=generator)
    logprobs, entropies = token_logprobs(logits, targets)
    exact = logits.detach().double().log_softmax(-1)
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert_allclose(logprobs.detach(), exact[torch.arange(3), targets], rtol=1e-5, atol=1e-5)
    assert (entropies >= -1e-5).all()
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    expected = torch.nn.functional.one_hot(targets, 40) - exact.exp()
    assert_allclose(logits.grad.double(), expected, rtol=1e-2, atol=1e-4)


def test_a_token_that_cannot_be_drawn_does_not_spoil_the_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    logprobs, entropies = token_logprobs(logits, torch.tensor([1]))
    assert_allclose(logprobs, [-0.6931472], rtol=1e-6)
    assert_allclose(entropies, [0.6931472], rtol=1e-6)


def test_gradients_flow_past_rows_that_are_mostly_padding() -> None:
    model, batch = causal_lm(), mixed_batch()
    inputs: PolicyInputs = pad_policy(batch.prompt_ids, batch.completion_ids)
    completion_outputs(model, inputs).logprobs.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
