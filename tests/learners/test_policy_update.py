"""An update of a policy equals plain autograd and AdamW over one unpadded sample at a time."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from test_policy import ADVANTAGES, MINIBATCHES, TARGETS, policy
from tiny_models import batch_of, bits_of, causal_lm, mixed_batch, plain_forward, plain_token_logprobs
from torch import Tensor

from learners.optimiser import NonFiniteLossError
from learners.policy import PolicyUpdate
from learners.value_head import ValueHead

CLIP, COEF = 0.2, 0.6


def plain_update(
    model: Any, head: ValueHead | None, mode: str, old_values: np.ndarray | None
) -> tuple[list[float], list[float]]:
    """The specification's update, one sample at a time; returns actor and critic losses per mini-batch."""
    parameters = [*model.parameters(), *([] if head is None else head.parameters())]
    adamw = torch.optim.AdamW(parameters, lr=1e-2)
    batch = mixed_batch()
    actor_losses, critic_losses = [], []
    for minibatch in MINIBATCHES:
        actors: list[Tensor] = []
        critics: list[Tensor] = []
        for i in minibatch:
            prompt, completion = batch.prompt_ids[i], batch.completion_ids[i]
            actors.append(-plain_token_logprobs(model, prompt, completion).sum() * float(ADVANTAGES[i]))
            if head is not None and old_values is not None:
                _, hidden = plain_forward(model, prompt, completion)
                value, target, old = (
                    head(hidden[len(prompt) - 1 if mode == "v" else -1]),
                    float(TARGETS[i]),
                    old_values[i],
                )
                clipped = old + max(-CLIP, min(CLIP, value - old))
                critics.append(max((value - target) ** 2, (clipped - target) ** 2))
        actor = sum(actors, torch.zeros(())) / len(minibatch)
        critic = sum(critics, torch.zeros(())) / len(minibatch)
        adamw.zero_grad()
        (actor + COEF * critic).backward()
        adamw.step()
        actor_losses.append(actor.item())
        critic_losses.append(critic.item())
    return actor_losses, critic_losses


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("tokens", [1, 25, 10_000])
def test_an_update_equals_the_plain_one_whatever_the_micro_batches(architecture: str, tokens: int) -> None:
    model = causal_lm(architecture)
    expected_model = copy.deepcopy(model)
    expected, _ = plain_update(expected_model, None, "v", None)
    update = policy(model=model, micro_batch_tokens=tokens).update(mixed_batch(), ADVANTAGES, MINIBATCHES)
    assert_allclose(update.actor_loss, expected, rtol=1e-5, atol=1e-5)
    assert update.critic_loss == []
    assert_models_close(model, expected_model)


@pytest.mark.parametrize("mode", ["v", "q"])
@pytest.mark.parametrize("tokens", [25, 10_000])
def test_a_shared_backbone_learns_actor_and_critic_with_one_optimiser(mode: Any, tokens: int) -> None:
    model, head = causal_lm(), ValueHead(16, 6, seed=2).double()
    expected_model, expected_head = copy.deepcopy(model), copy.deepcopy(head)
    subject = policy(
        model=model,
        value_head=head,
        value_mode=mode,
        value_clip_range=CLIP,
        value_loss_coef=COEF,
        micro_batch_tokens=tokens,
    )
    old_values = subject.score(mixed_batch()).values
    assert old_values is not None
    actor, critic = plain_update(expected_model, expected_head, mode, old_values)
    update = subject.update(mixed_batch(), ADVANTAGES, MINIBATCHES, td_targets=TARGETS, old_values=old_values)
    assert_allclose(update.actor_loss, actor, rtol=1e-5, atol=1e-5)
    assert_allclose(update.critic_loss, critic, rtol=1e-5, atol=1e-6)
    assert_models_close(model, expected_model)
    assert_models_close(head, expected_head)


def assert_models_close(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    moved = 0.0
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        # Two orders of magnitude below the learning rate, the least a wrong sign or scale would show as.
        assert_allclose(ours.detach(), theirs.detach(), rtol=0, atol=1e-4, err_msg=name)
        moved += float((ours - theirs).detach().abs().mean())
    assert moved < 1e-4


def test_metrics_are_means_over_the_samples_stepped() -> None:
    model, batch = causal_lm(), mixed_batch()
    everything = [list(range(len(batch)))]
    before = policy(model=model).score(batch)
    update = policy(model=model).update(batch, ADVANTAGES, everything)
    assert update.metrics["entropy"] == pytest.approx(before.entropy.mean(), rel=1e-6)
    assert update.metrics["logprob"] == pytest.approx(before.logprob.mean(), rel=1e-6)
    assert update.metrics["grad_norm"] > 0
    assert "value" not in update.metrics


def test_token_logprobs_are_reported_of_the_first_minibatch_before_its_step() -> None:
    model, batch = causal_lm(), mixed_batch()
    with torch.no_grad():
        expected = {
            i: plain_token_logprobs(model, batch.prompt_ids[i], batch.completion_ids[i])
            for i in MINIBATCHES[0]
        }
    update = policy(model=model, micro_batch_tokens=25).update(batch, ADVANTAGES, MINIBATCHES)
    assert set(update.token_logprobs) == set(expected)
    for i, logprobs in expected.items():
        assert update.token_logprobs[i].shape == (len(batch.completion_ids[i]),)
        assert_allclose(update.token_logprobs[i], logprobs, atol=1e-6)


def test_an_update_of_empty_completions_alone_moves_nothing_but_the_decay() -> None:
    model = causal_lm()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    update = policy(model=model).update(batch_of([3, 5], [0, 0]), [1.0, -1.0], [[0, 1]])
    assert update.actor_loss == [0.0]
    assert update.metrics["grad_norm"] == 0.0
    for name, parameter in model.named_parameters():
        assert_allclose(parameter.detach(), before[name] * (1 - 1e-2 * 0.01), rtol=1e-12)


def test_gradient_checkpointing_and_dropout_in_the_config_change_no_number() -> None:
    def run(checkpointing: bool) -> tuple[PolicyUpdate, Any, int]:
        model = causal_lm("gpt2")
        assert model.config.resid_pdrop > 0
        subject = policy(model=model, gradient_checkpointing=checkpointing)
        passes: list[int] = []
        model.transformer.h[0].attn.register_forward_pre_hook(lambda *_: passes.append(1))
        update = subject.update(mixed_batch(), ADVANTAGES, MINIBATCHES)
        return update, bits_of(model.state_dict()), len(passes)

    plain, plain_weights, plain_passes = run(False)
    checkpointed, weights, passes = run(True)
    assert passes == 2 * plain_passes, "every layer is computed again in the backward pass"
    assert checkpointed.actor_loss == plain.actor_loss
    assert weights == plain_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_minibatch_whose_loss_is_not_finite_is_named_and_not_stepped(dtype: torch.dtype) -> None:
    model, batch = causal_lm(dtype=dtype, tied=False), mixed_batch()
    poison = 2  # a token that no batch of the tests holds
    batch.prompt_ids[6][0] = poison
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan
    twin = copy.deepcopy(model)
    subject, healthy = (policy(model=m, name="agent 1") for m in (model, twin))
    with pytest.raises(NonFiniteLossError, match=r"agent 1, mini-batch 2: the loss is not finite") as caught:
        subject.update(batch, ADVANTAGES, MINIBATCHES)
    assert caught.value.minibatch == 2
    healthy.update(batch, ADVANTAGES, MINIBATCHES[:2])
    ours, theirs = subject.state_dict(), healthy.state_dict()
    assert bits_of([ours["model"], ours["optimiser"]]) == bits_of([theirs["model"], theirs["optimiser"]])
    assert (ours["updates_done"], theirs["updates_done"]) == (0, 1)


def test_inputs_that_are_not_finite_are_refused_before_the_first_step() -> None:
    subject = policy(value_head=ValueHead(16), name="agent 1")
    before = bits_of(subject.state_dict())
    bad = np.where(np.arange(7) == 6, np.nan, ADVANTAGES)
    good: Any = {"td_targets": TARGETS, "old_values": TARGETS}
    for name in ("advantages", "td_targets", "old_values"):
        arguments = {"advantages": ADVANTAGES, **good, name: bad}
        with pytest.raises(
            NonFiniteLossError, match=f"agent 1, before the first mini-batch: {name} not finite"
        ):
            subject.update(mixed_batch(), minibatches=MINIBATCHES, **arguments)
    assert bits_of(subject.state_dict()) == before


def test_targets_and_a_value_head_belong_together() -> None:
    with pytest.raises(ValueError, match="both needed with a value head"):
        policy(value_head=ValueHead(16)).update(mixed_batch(), ADVANTAGES, MINIBATCHES)
    with pytest.raises(ValueError, match="refused without one"):
        policy().update(mixed_batch(), ADVANTAGES, MINIBATCHES, td_targets=TARGETS, old_values=TARGETS)


def test_inputs_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\), the batch has 7 samples"):
        policy().update(mixed_batch(), ADVANTAGES[:3], MINIBATCHES)


def test_a_bfloat16_policy_learns_by_steps_that_bfloat16_alone_would_lose() -> None:
    model = causal_lm(dtype=torch.bfloat16)
    subject = policy(model=model, learning_rate=5e-6)
    start = [p.detach().float().clone() for p in model.parameters()]
    for _ in range(3):
        subject.update(mixed_batch(), ADVANTAGES, MINIBATCHES)
    masters = subject.state_dict()["optimiser"]["masters"]
    visible = [bool((p.float() != s).any()) for p, s in zip(model.parameters(), start, strict=True)]
    moved = [bool((m != s).any()) for m, s in zip(masters, start, strict=True)]
    assert all(moved)
    norms = [i for i, (name, _) in enumerate(model.named_parameters()) if "norm" in name]
    assert norms
    assert not any(visible[i] for i in norms), "weights of 1.0 cannot show a step of 5e-6 in bfloat16"
    scores = subject.score(mixed_batch())
    assert scores.logprob.dtype == np.float32


@pytest.mark.parametrize("tokens", [1, 25, 10_000])
def test_importance_weights_scale_each_token_and_carry_no_gradient(tokens: int) -> None:
    model = causal_lm()
    batch, rng, cap = mixed_batch(), np.random.default_rng(5), 1.3
    expected_model = copy.deepcopy(model)
    with torch.no_grad():
        drawn = [
            plain_token_logprobs(model, prompt, completion).numpy() + rng.normal(0, 0.5, len(completion))
            for prompt, completion in zip(batch.prompt_ids, batch.completion_ids, strict=True)
        ]
    batch.sampled_logprobs = drawn
    update = policy(model=model, micro_batch_tokens=tokens, importance_sampling_cap=cap).update(
        batch, ADVANTAGES, MINIBATCHES
    )
    adamw = torch.optim.AdamW(expected_model.parameters(), lr=1e-2)
    seen, losses = [], []
    for minibatch in MINIBATCHES:
        terms = [torch.zeros(())]
        for i in minibatch:
            logprobs = plain_token_logprobs(expected_model, batch.prompt_ids[i], batch.completion_ids[i])
            weights = [min(np.exp(x - y), cap) for x, y in zip(logprobs.tolist(), drawn[i], strict=True)]
            seen.append(np.mean(weights) if weights else 0.0)
            weighted = sum((w * x for w, x in zip(weights, logprobs, strict=True)), torch.zeros(()))
            terms.append(-weighted * float(ADVANTAGES[i]))
        loss = torch.stack([term.double() for term in terms]).sum() / len(minibatch)
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    assert_allclose(update.actor_loss, losses, rtol=1e-5, atol=1e-5)
    assert_allclose(update.metrics["importance_weight"], np.mean(seen), rtol=1e-5)
    assert_models_close(model, expected_model)


def test_a_cap_without_the_samplers_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="importance weights need the sampler's log-probabilities"):
        policy(importance_sampling_cap=2.0).update(mixed_batch(), ADVANTAGES, MINIBATCHES)
