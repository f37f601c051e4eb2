"""Values, updates, checkpoints and shared parameters of critics, against one unpadded text at a time."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from tiny_models import bits_of, causal_lm, ids
from transformers import AutoModel

from learners.critic import Critic
from learners.models import load_backbone
from learners.optimiser import NonFiniteLossError
from learners.samples import IntArray
from learners.value_head import ValueHead

MINIBATCHES = [[0, 3, 5], [1, 2, 4]]
TARGETS = np.array([0.5, -0.3, 0.8, -1.2, 0.1, 0.9], dtype=np.float32)


def texts() -> list[IntArray]:
    """Six texts of which three are the same, spread over both mini-batches."""
    rng = np.random.default_rng(4)
    a, b, c, d = (ids(rng, n) for n in (7, 2, 11, 5))
    return [a, b, a.copy(), c, d, a.copy()]


def critic(model: Any = None, *, head: ValueHead | None = None, **options: Any) -> Critic:
    return Critic(
        causal_lm() if model is None else model,
        ValueHead(16, 6, seed=1) if head is None else head,
        **{"learning_rate": 1e-2, **options},
    )


def plain_value(backbone: Any, head: Any, text: IntArray) -> torch.Tensor:
    hidden = backbone(torch.tensor(text.astype(np.int64))[None]).last_hidden_state
    value: torch.Tensor = head(hidden[0, -1])
    return value


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
@pytest.mark.parametrize("tokens", [1, 20, 10_000])
def test_values_are_read_from_the_last_token_of_each_text(architecture: str, tokens: int) -> None:
    subject = critic(causal_lm(architecture), micro_batch_tokens=tokens)
    values = subject.values(texts())
    assert values.dtype == np.float64
    with torch.no_grad():
        for value, text in zip(values, texts(), strict=True):
            assert_allclose(value, plain_value(subject.backbone, subject.value_head, text), atol=1e-6)
    assert values[0] == values[2] == values[5]


def test_a_text_that_occurs_several_times_is_read_once() -> None:
    subject = critic()
    rows: list[int] = []
    subject.backbone.register_forward_hook(lambda _m, _a, out: rows.append(len(out.last_hidden_state)))
    subject.values(texts())
    assert sum(rows) == 4


@pytest.mark.parametrize("tokens", [1, 20, 10_000])
def test_an_update_equals_plain_autograd_whatever_the_micro_batches(tokens: int) -> None:
    subject = critic(micro_batch_tokens=tokens, value_loss_coef=0.3)
    backbone: Any = copy.deepcopy(subject.backbone)
    head = copy.deepcopy(subject.value_head)
    adamw = torch.optim.AdamW([*backbone.parameters(), *head.parameters()], lr=1e-2)
    losses, values = [], []
    for minibatch in MINIBATCHES:
        value = torch.stack([plain_value(backbone, head, texts()[i]) for i in minibatch])
        loss = (value - torch.from_numpy(TARGETS[minibatch]).double()).square().mean()
        adamw.zero_grad()
        (0.3 * loss).backward()
        adamw.step()
        losses.append(loss.item())
        values.append(value.mean().item())
    update = subject.update(texts(), TARGETS, MINIBATCHES)
    assert_allclose(update.critic_loss, losses, rtol=1e-6)
    assert update.metrics["value"] == pytest.approx(np.mean(values), rel=1e-6)
    for module, expected in ((subject.backbone, backbone), (subject.value_head, head)):
        for (name, ours), theirs in zip(module.named_parameters(), expected.parameters(), strict=True):
            assert_allclose(ours.detach(), theirs.detach(), rtol=0, atol=1e-4, err_msg=name)


def test_updates_move_values_towards_their_targets() -> None:
    subject = critic(learning_rate=3e-3)
    first, *_, last = [subject.update(texts(), TARGETS, [list(range(6))]).critic_loss[0] for _ in range(30)]
    # Texts 0, 2 and 5 are one text with three targets: their variance is what no critic can explain.
    floor = TARGETS[[0, 2, 5]].var() * 3 / 6
    assert last - floor < 0.2 * (first - floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_critic_continues_bit_for_bit(dtype: torch.dtype) -> None:
    def fresh(seed: int) -> Critic:
        return critic(causal_lm(dtype=dtype, seed=seed), head=ValueHead(16, seed=seed))

    first, second = fresh(0), fresh(1)
    first.update(texts(), TARGETS, MINIBATCHES)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    first.update(texts(), TARGETS, MINIBATCHES)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    second.update(texts(), TARGETS, MINIBATCHES)
    assert bits_of(second.state_dict()) == bits_of(first.state_dict())
    assert second.updates_done == 2
    assert_array_equal(first.values(texts()), second.values(texts()))


def test_a_bfloat16_critic_keeps_float32_values_and_head() -> None:
    subject = critic(causal_lm(dtype=torch.bfloat16))
    assert subject.values(texts()).dtype == np.float32
    assert {p.dtype for p in subject.value_head.parameters()} == {torch.float32}
    assert {p.dtype for p in subject.backbone.parameters()} == {torch.bfloat16}


def test_a_saved_critic_is_loaded_by_path_with_its_head_beside_it(tmp_path: Path) -> None:
    subject = critic(causal_lm(dtype=torch.float32))
    subject.update(texts(), TARGETS, MINIBATCHES)
    subject.save_pretrained(tmp_path)
    plain = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert bits_of(plain.state_dict()) == bits_of(subject.backbone.state_dict())
    again = critic(load_backbone(str(tmp_path)), head=ValueHead.load(tmp_path))
    assert_array_equal(again.values(texts()), subject.values(texts()))


def test_a_path_gives_every_critic_its_own_parameters(tmp_path: Path) -> None:
    causal_lm(dtype=torch.float32).save_pretrained(tmp_path)
    one, other = (critic(load_backbone(str(tmp_path))) for _ in range(2))
    before = other.values(texts())
    one.update(texts(), TARGETS, MINIBATCHES)
    assert_array_equal(other.values(texts()), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_built_model_given_to_several_critics_shares_its_parameters(dtype: torch.dtype) -> None:
    model = causal_lm(dtype=dtype)
    one, other = (critic(load_backbone(model), learning_rate=1e-1) for _ in range(2))
    assert one.backbone is other.backbone is model.base_model
    before = other.values(texts())
    one.update(texts(), TARGETS, MINIBATCHES)
    between = other.values(texts())
    assert (between != before).any()
    other.update(texts(), TARGETS, MINIBATCHES)
    assert (one.values(texts()) != before).any()
    assert bits_of(one.state_dict()["backbone"]) == bits_of(other.state_dict()["backbone"])


def test_a_target_that_is_not_finite_is_refused_before_any_step() -> None:
    subject = critic(name="critic 1")
    before = bits_of(subject.state_dict())
    with pytest.raises(
        NonFiniteLossError, match="critic 1, before the first mini-batch: td_targets not finite"
    ):
        subject.update(texts(), np.where(np.arange(6) == 4, np.inf, TARGETS), MINIBATCHES)
    assert bits_of(subject.state_dict()) == before


def test_a_loss_that_is_not_finite_leaves_the_weights_alone() -> None:
    subject = critic(name="critic 1")
    with torch.no_grad():
        subject.value_head.value_projection.bias.fill_(torch.inf)
    before = bits_of(subject.state_dict())
    with pytest.raises(NonFiniteLossError, match="critic 1, mini-batch 0: the loss is not finite"):
        subject.update(texts(), TARGETS, MINIBATCHES)
    assert bits_of(subject.state_dict()) == before


def test_targets_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"td_targets has shape \(2,\), for 6 texts"):
        critic().update(texts(), TARGETS[:2], MINIBATCHES)


def test_gradient_checkpointing_changes_no_number() -> None:
    plain, checkpointed = (critic(causal_lm("gpt2"), gradient_checkpointing=flag) for flag in (False, True))
    for subject in (plain, checkpointed):
        subject.update(texts(), TARGETS, MINIBATCHES)
    assert bits_of(checkpointed.state_dict()) == bits_of(plain.state_dict())
