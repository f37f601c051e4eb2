"""AdamW over float32 master weights, and the refusal to step on numbers that are not finite.

This module owns the optimiser's state and precision.  It must not know losses, models or mini-batch contents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from learners.ranks import ALONE, Ranks, norm_of, part_of

_MASTER = "_greenroom_master"
"""Attribute of a half-precision parameter that holds its master copy.  It lives on the parameter, so that two
optimisers over one shared parameter move the same master instead of overwriting each other's."""


class NonFiniteLossError(RuntimeError):
    """A mini-batch's loss or gradient is not finite.  Raised before that mini-batch's step touches any
    weight."""

    def __init__(self, learner: str, minibatch: int | None, loss: float, cause: str) -> None:
        """`cause` says what was not finite; `minibatch` None means the update's inputs, before any
        mini-batch."""
        super().__init__(learner, minibatch, loss, cause)
        self.learner = learner
        self.minibatch = minibatch
        self.loss = loss
        self.cause = cause

    def __str__(self) -> str:
        where = "before the first mini-batch" if self.minibatch is None else f"mini-batch {self.minibatch}"
        return (
            f"{self.learner}, {where}: {self.cause} (loss {self.loss}); the weights are as before that step"
        )


class Optimiser:
    """AdamW with torch's defaults (betas 0.9 and 0.999, eps 1e-8, weight decay 0.01).

    Parameters of half precision get float32 master weights, float32 moments and float32 gradient
    accumulation: at a learning rate of 5e-6 most updates are smaller than half a bfloat16 step and would
    otherwise be lost.  Wider parameters are stepped as they are.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], learning_rate: float, *, learner: str, ranks: Ranks = ALONE
    ) -> None:
        """`learner` names the owner in errors.  Parameters that take no gradient are left out.  `ranks` are those
        over which the parameters are sharded; moments and masters are sharded like them."""
        self._parameters = [p for p in parameters if p.requires_grad]
        if not self._parameters:
            raise ValueError(f"{learner} has no parameter to train")
        self._learner = learner
        self._ranks = ranks
        self._half: list[Tensor] = [p for p in self._parameters if p.dtype in (torch.bfloat16, torch.float16)]
        self._masters = [_master_of(p) for p in self._half]
        stepped: list[Tensor] = [
            getattr(p, _MASTER) if p.dtype in (torch.bfloat16, torch.float16) else p for p in self._parameters
        ]
        self._stepped = stepped
        self._learning_rate = learning_rate
        self._fused = True if all(p.is_cuda for p in stepped) else None
        self._adamw = torch.optim.AdamW(stepped, lr=learning_rate, fused=self._fused)

    def zero_grad(self) -> None:
        """Drops every gradient, the half-precision ones included."""
        for parameter in self._parameters:
            parameter.grad = None
        for tensor in self._stepped:
            tensor.grad = None

    def step(self, loss: Tensor, minibatch: int) -> float:
        """Steps on the accumulated gradients of a mini-batch whose loss is `loss`; returns the gradient's L2
        norm.

        Raises NonFiniteLossError, with every weight and moment as it was, when the loss or the norm is not
        finite.
        """
        gradients = [t.grad for t in self._stepped if t.grad is not None]
        norm = norm_of(gradients)
        # One transfer for both numbers: each is a wait for the device.
        pair = torch.stack([loss.detach().double(), norm.double().to(loss.device)]).tolist()
        loss_value, norm_value = float(pair[0]), float(pair[1])
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            self.zero_grad()
            cause = (
                "the loss is not finite" if not math.isfinite(loss_value) else "the gradient is not finite"
            )
            raise NonFiniteLossError(self._learner, minibatch, loss_value, cause)
        self._adamw.step()
        self.zero_grad()
        self._publish()
        return norm_value

    def require_finite(self, name: str, numbers: Tensor) -> None:
        """Raises NonFiniteLossError when an input of the whole update, `name`, holds a number that is not
        finite."""
        if not bool(torch.isfinite(numbers).all()):
            raise NonFiniteLossError(self._learner, None, math.nan, f"{name} not finite")

    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and master weights, whole (on the rank that leads).  Tensors that are not sharded are
        the live ones: save them before the next step."""
        adamw = self._adamw.state_dict()
        gather = self._ranks.gather
        moments = {i: {k: gather(t) for k, t in own.items()} for i, own in adamw["state"].items()}
        return {"adamw": {**adamw, "state": moments}, "masters": [gather(master) for master in self._masters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state saved by an optimiser over the same parameters in the same order.

        The learning rate stays the one this optimiser was made with.
        """
        if len(state["masters"]) != len(self._masters):
            raise ValueError(
                f"{self._learner}: the saved state has {len(state['masters'])} master weights, this model "
                f"needs {len(self._masters)}: it was saved in another dtype"
            )
        moments = {
            i: {k: self._like(t, self._stepped[i]) for k, t in own.items()}
            for i, own in state["adamw"]["state"].items()
        }
        self._adamw.load_state_dict({**state["adamw"], "state": moments})
        for group in self._adamw.param_groups:
            group["lr"], group["fused"] = self._learning_rate, self._fused
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(self._ranks.share(saved, master))
        self._publish()

    def _like(self, saved: Tensor, parameter: Tensor) -> Tensor:
        """A moment is cut like its parameter; a step count is not."""
        return self._ranks.share(saved, parameter) if saved.shape == parameter.shape else saved.clone()

    def _publish(self) -> None:
        """Rounds the master weights into the model's parameters."""
        if self._half:
            with torch.no_grad():
                # This rank's parts: sharded tensors cannot be copied many at a time.
                torch._foreach_copy_([part_of(p) for p in self._half], [part_of(m) for m in self._masters])


def _master_of(parameter: Tensor) -> Tensor:
    """The parameter's float32 master, made on first use together with the hook that accumulates its
    gradient."""
    existing = getattr(parameter, _MASTER, None)
    if isinstance(existing, Tensor):
        if not torch.equal(existing.to(parameter.dtype), parameter.detach()):
            existing.copy_(parameter.detach())  # the model was loaded anew since its last optimiser
        return existing
    master = parameter.detach().float()
    setattr(parameter, _MASTER, master)

    def accumulate(source: Tensor) -> None:
        # Summing micro-batches in bfloat16 would drop whatever is 256 times smaller than the sum so far.
        if source.grad is not None:
            gradient = source.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            source.grad = None

    parameter.register_post_accumulate_grad_hook(accumulate)  # type: ignore
    return master
