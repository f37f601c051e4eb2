"""The losses of actor-critic learning, as the specification writes them.

This module owns formulas on tensors.  It must not know models, optimisers or batches of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def actor_loss(logprob: Tensor, advantage: Tensor) -> Tensor:
    """Policy-gradient loss `mean(-(log pi(a|h) * delta))`.

    `logprob` [n] is the sum of a completion's token log-probabilities, `advantage` [n] its fixed weight.
    """
    return -(logprob * advantage).mean()


def truncated_importance(logprob: Tensor, sampled_logprob: Tensor, cap: float) -> Tensor:
    """How much likelier each token is to the policy that learns than to the one that drew it, at most `cap`.

    `min(exp(log pi_learner - log pi_sampler), cap)`, a fixed weight without gradient; any shape.  Importance weights
    truncated from above (Ionides 2008; per token as in IMPALA, Espeholt et al. 2018) bound the variance at the price
    of a bias that shrinks as the two policies agree.
    """
    return (logprob.detach() - sampled_logprob).exp().clamp(max=cap)


def critic_loss(value: Tensor, td_target: Tensor) -> Tensor:
    """Squared TD error `mean((y - V)^2)` of values and targets of shape [n], not scaled by any
    coefficient."""
    return (td_target - value).square().mean()


def clipped_value_loss(
    value: Tensor, old_value: Tensor, td_target: Tensor, clip_range: float | None
) -> Tensor:
    """Critic loss of a value head on the actor's backbone, pessimistic about leaving the old value's
    neighbourhood.

    `mean(max((V - y)^2, (V_clip - y)^2))` with `V_clip = V_old + clamp(V - V_old, -eps, eps)`; shapes [n].
    `clip_range` None turns the clipping off.
    """
    if clip_range is None:
        return critic_loss(value, td_target)
    clipped = old_value + (value - old_value).clamp(-clip_range, clip_range)
    return torch.maximum((value - td_target).square(), (clipped - td_target).square()).mean()


def reference_kl(logprob: Tensor, reference_logprob: Tensor, mask: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) on each sampled completion, never negative.

    Schulman's estimator `exp(d) - d - 1`, `d = log p_ref - log p_policy`, summed over the completion's
    tokens. `logprob` and `reference_logprob` are per token, [n, tokens]; `mask` is true on completion tokens.
    Returns [n].
    """
    d = torch.where(mask, reference_logprob - logprob, 0.0)
    return (torch.expm1(d) - d).sum(dim=-1)
