"""The optimiser is torch's AdamW, keeps half-precision updates, and refuses numbers that are not finite."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from tiny_models import bits_of
from torch import Tensor, nn

from learners.optimiser import NonFiniteLossError, Optimiser


def layer(dtype: torch.dtype, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3).to(dtype)


def loss_of(module: nn.Module, data_seed: int, scale: float = 1.0) -> Tensor:
    data = torch.randn(5, 4, generator=torch.Generator().manual_seed(data_seed))
    out: Tensor = module(data.to(next(module.parameters()).dtype))
    return scale * out.square().mean()


def run(module: nn.Module, optimiser: Optimiser, steps: range) -> None:
    for number in steps:
        loss = loss_of(module, number)
        loss.backward()
        optimiser.step(loss, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_parameters_are_stepped_exactly_as_by_torch_adamw(dtype: torch.dtype) -> None:
    ours, theirs = layer(dtype), layer(dtype)
    run(ours, Optimiser(ours.parameters(), 1e-2, learner="x"), range(4))
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for number in range(4):
        adamw.zero_grad()
        loss_of(theirs, number).backward()
        adamw.step()
    assert bits_of(ours.state_dict()) == bits_of(theirs.state_dict())


def test_the_reported_norm_is_that_of_the_whole_gradient() -> None:
    module = layer(torch.float64)
    optimiser = Optimiser(module.parameters(), 1e-2, learner="x")
    loss = loss_of(module, 0)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]).norm()
    loss_of(module, 0).backward()
    assert optimiser.step(loss, 0) == pytest.approx(expected.item(), rel=1e-12)


def test_updates_too_small_for_bfloat16_gather_in_float32_masters() -> None:
    module = nn.Linear(4, 3).to(torch.bfloat16)
    with torch.no_grad():
        module.weight.fill_(1.0)
        module.bias.fill_(1.0)
    optimiser = Optimiser(module.parameters(), 1e-4, learner="x")
    before = bits_of(module.state_dict())

    def step() -> None:
        loss = sum((p.float().sum() for p in module.parameters()), torch.zeros(()))
        loss.backward()
        optimiser.step(loss, 0)

    step()
    masters = optimiser.state_dict()["masters"]
    # Half a bfloat16 step below 1.0 is 0.00195; AdamW's first step is the learning rate plus decay.
    assert bits_of(module.state_dict()) == before
    assert all(m.dtype == torch.float32 for m in masters)
    for master in masters:
        torch.testing.assert_close(master, torch.full_like(master, 1.0 - 1e-4 - 1e-4 * 0.01))
    for _ in range(29):
        step()
    assert (module.weight < 1.0).all()
    assert bits_of(list(module.parameters())) == bits_of([m.bfloat16() for m in masters])
    moments = optimiser.state_dict()["adamw"]["state"].values()
    assert {m[name].dtype for m in moments for name in ("exp_avg", "exp_avg_sq")} == {torch.float32}


def test_half_precision_gradients_are_summed_in_float32() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimiser = Optimiser([parameter], 1e-3, learner="x")
    # In bfloat16 256 + 1 is 256: the ones would be lost.
    for gradient in [256.0, *[1.0] * 10]:
        (parameter * gradient).sum().backward()
    assert optimiser.step(torch.zeros(()), 0) == 266.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_or_gradient_that_is_not_finite_touches_nothing(dtype: torch.dtype, bad: float) -> None:
    module = layer(dtype)
    optimiser = Optimiser(module.parameters(), 1e-2, learner="agent 3")
    run(module, optimiser, range(2))
    before = bits_of([module.state_dict(), optimiser.state_dict()])
    loss = loss_of(module, 2, scale=bad)
    loss.backward()
    with pytest.raises(NonFiniteLossError, match=r"agent 3, mini-batch 7: the loss is not finite"):
        optimiser.step(loss, 7)
    assert bits_of([module.state_dict(), optimiser.state_dict()]) == before
    loss_of(module, 2, scale=bad).backward()
    with pytest.raises(NonFiniteLossError, match="the gradient is not finite"):
        optimiser.step(torch.zeros(()), 7)
    assert bits_of([module.state_dict(), optimiser.state_dict()]) == before
    run(module, optimiser, range(2, 3))
    assert bits_of(module.state_dict()) != before[0]
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_the_error_survives_a_process_boundary() -> None:
    error = pickle.loads(
        pickle.dumps(NonFiniteLossError("critic 0", 2, float("inf"), "the loss is not finite"))
    )
    assert (error.learner, error.minibatch, error.loss) == ("critic 0", 2, float("inf"))
    assert str(error).startswith("critic 0, mini-batch 2: the loss is not finite (loss inf)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_saved_and_loaded_optimiser_continues_bit_for_bit(dtype: torch.dtype) -> None:
    first = layer(dtype)
    optimiser = Optimiser(first.parameters(), 1e-2, learner="x")
    run(first, optimiser, range(3))
    file = io.BytesIO()
    torch.save([first.state_dict(), optimiser.state_dict()], file)
    run(first, optimiser, range(3, 5))

    second = layer(dtype, seed=9)
    resumed = Optimiser(second.parameters(), 1e-2, learner="x")
    file.seek(0)
    model_state, optimiser_state = torch.load(file, weights_only=True)
    second.load_state_dict(model_state)
    resumed.load_state_dict(optimiser_state)
    run(second, resumed, range(3, 5))
    assert bits_of(second.state_dict()) == bits_of(first.state_dict())
    assert bits_of(resumed.state_dict()) == bits_of(optimiser.state_dict())


def test_loading_keeps_the_learning_rate_of_the_new_configuration() -> None:
    saved = Optimiser(layer(torch.float32).parameters(), 1e-2, learner="x").state_dict()
    optimiser = Optimiser(layer(torch.float32).parameters(), 1e-3, learner="x")
    optimiser.load_state_dict(saved)
    assert optimiser.state_dict()["adamw"]["param_groups"][0]["lr"] == 1e-3


def test_a_state_of_another_precision_is_refused() -> None:
    saved = Optimiser(layer(torch.float32).parameters(), 1e-2, learner="x").state_dict()
    with pytest.raises(ValueError, match=r"agent 1: .* 0 master weights, this model needs 2"):
        Optimiser(layer(torch.bfloat16).parameters(), 1e-2, learner="agent 1").load_state_dict(saved)


def test_two_optimisers_over_one_half_precision_module_share_its_masters() -> None:
    shared, alone = layer(torch.bfloat16), layer(torch.bfloat16)
    pair = [Optimiser(shared.parameters(), 1e-4, learner=name) for name in "ab"]
    run(shared, pair[0], range(1))
    first = bits_of(pair[0].state_dict()["masters"])
    run(shared, pair[1], range(1, 2))
    assert bits_of(pair[1].state_dict()["masters"]) == bits_of(pair[0].state_dict()["masters"]) != first
    one = Optimiser(alone.parameters(), 1e-4, learner="c")
    run(alone, one, range(1))
    assert bits_of(one.state_dict()["masters"]) == first


def test_weights_loaded_after_an_optimiser_was_made_are_what_the_next_one_starts_from() -> None:
    module = layer(torch.bfloat16)
    Optimiser(module.parameters(), 1e-4, learner="a")
    module.load_state_dict(layer(torch.bfloat16, seed=5).state_dict())
    masters = Optimiser(module.parameters(), 1e-4, learner="b").state_dict()["masters"]
    assert bits_of([m.bfloat16() for m in masters]) == bits_of(list(module.parameters()))


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ValueError, match="agent 0 has no parameter to train"):
        Optimiser(layer(torch.float32).requires_grad_(False).parameters(), 1e-3, learner="agent 0")
