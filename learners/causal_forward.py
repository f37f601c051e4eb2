"""One forward pass of a causal language model over prompts and completions: log-probabilities, entropies,
hidden states.

This module owns how a model is called.  It must not know losses, optimisers or what is done with the numbers.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from learners.padding import PolicyInputs

CHUNK_ELEMENTS = 1 << 26
"""Logits upcast at a time: 256 MiB in float32, whatever vocabulary and micro-batch."""


@dataclass(frozen=True, slots=True)
class CompletionOutputs:
    """What a forward pass says about the completions of `n` rows."""

    logprobs: Tensor
    """[n, C]: untempered log-probability of each completion token, 0 in padding."""
    entropies: Tensor
    """[n, C]: entropy of the distribution each token was drawn from, without gradient, 0 in padding."""
    hidden: Tensor | None
    """[n, P + C, hidden]: last hidden states, where asked for."""


class _TokenLogprobs(torch.autograd.Function):
    """`logits[target] - logsumexp(logits)` in at least float32, a chunk of rows at a time.

    The plain expression keeps a float32 copy of all logits for the backward pass; with a vocabulary of
    150,000 that copy is larger than the model.  Here only the logits, in their own precision, and one
    logsumexp per token are kept.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [t] of logits [t, V] and targets [t]."""
        precision = torch.promote_types(logits.dtype, torch.float32)
        lse = torch.empty(targets.shape, dtype=precision, device=logits.device)
        entropy = torch.empty_like(lse)
        for rows in _chunks(logits):
            chunk = logits[rows].to(precision)
            lse[rows] = chunk.logsumexp(dim=-1)
            logprob = chunk - lse[rows, None]
            # Terms of one sign do not cancel.  Probability 0 adds nothing, but 0 * -inf would be NaN.
            terms = logprob.exp().mul_(logprob).masked_fill_(logprob == -torch.inf, 0.0)
            entropy[rows] = -terms.sum(dim=-1)
        picked = logits.gather(-1, targets[:, None]).squeeze(-1).to(precision)
        ctx.save_for_backward(logits, targets, lse)
        ctx.mark_non_differentiable(entropy)
        return picked - lse, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        """d logprob / d logit = onehot(target) - softmax(logits)."""
        logits, targets, lse = ctx.saved_tensors
        gradient = gradients[0]
        result = torch.empty_like(logits)
        for rows in _chunks(logits):
            scale = -gradient[rows, None]
            chunk = (logits[rows].to(lse.dtype) - lse[rows, None]).exp_().mul_(scale)
            chunk.scatter_add_(-1, targets[rows, None], -scale)
            result[rows] = chunk.to(logits.dtype)
        return result, None


def _chunks(logits: Tensor) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)


def token_logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both [...], of logits [..., V].

    At least float32; only the log-probability carries a gradient.
    """
    apply: Any = _TokenLogprobs.apply
    logprobs, entropies = apply(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
    return logprobs.reshape(targets.shape), entropies.reshape(targets.shape)


def accepted_arguments(model: nn.Module) -> frozenset[str]:
    """Names of the arguments that `model.forward` declares."""
    return frozenset(inspect.signature(model.forward).parameters)


def base_of(model: nn.Module) -> nn.Module:
    """The model without its head: the part that ends in hidden states.  A model without a head is its own
    base."""
    base = getattr(model, "base_model", model)
    return base if isinstance(base, nn.Module) else model


@contextlib.contextmanager
def _captured_hidden(model: nn.Module, wanted: bool) -> Iterator[list[Tensor]]:
    """Collects the base model's last hidden states in passing: asking for all layers' would keep them all
    alive."""
    captured: list[Tensor] = []
    if not wanted:
        yield captured
        return

    def keep(_module: nn.Module, _arguments: Any, output: Any) -> None:
        captured.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    handle = base_of(model).register_forward_hook(keep)
    try:
        yield captured
    finally:
        handle.remove()


def completion_outputs(
    model: nn.Module, inputs: PolicyInputs, *, with_hidden: bool = False
) -> CompletionOutputs:
    """One forward pass over `inputs`; logits are computed for the completion positions only.

    The model's own head computes them (some scale or cap their logits), told by `logits_to_keep` which
    positions matter. Models that do not know that argument compute all logits, of which the needed ones are
    taken.
    """
    accepted = accepted_arguments(model)
    columns = inputs.logit_columns()
    arguments: dict[str, Any] = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    if "position_ids" in accepted:
        arguments["position_ids"] = inputs.position_ids
    if "use_cache" in accepted:
        arguments["use_cache"] = False
    if "logits_to_keep" in accepted:
        arguments["logits_to_keep"] = columns
    with _captured_hidden(model, with_hidden) as captured:
        logits: Tensor = model(**arguments).logits
    if "logits_to_keep" not in accepted:
        logits = logits[:, columns]
    logprobs, entropies = token_logprobs(logits, inputs.completion_ids)
    mask = inputs.completion_mask
    return CompletionOutputs(
        logprobs=torch.where(mask, logprobs, 0.0),
        entropies=torch.where(mask, entropies, 0.0),
        hidden=captured[0] if captured else None,
    )
