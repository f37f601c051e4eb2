"""Loading and preparing the networks that policies and critics train.

This module owns how a network comes from a path, a hub identifier or a caller's hands.  It must not know what
it is trained for.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from learners.causal_forward import base_of


def load_causal_lm(
    source: str | nn.Module,
    *,
    dtype: torch.dtype | str = torch.float32,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> nn.Module:
    """The causal language model at a path or identifier; an already built model is returned as it is."""
    if isinstance(source, nn.Module):
        return source
    return _load(AutoModelForCausalLM, source, dtype, trust_remote_code, attn_implementation)


def load_backbone(
    source: str | nn.Module,
    *,
    dtype: torch.dtype | str = torch.float32,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> nn.Module:
    """The model without head at a path or identifier; of an already built model, the base, sharing its
    parameters."""
    if isinstance(source, nn.Module):
        return base_of(source)
    return _load(AutoModel, source, dtype, trust_remote_code, attn_implementation)


def _load(
    factory: Any, source: str, dtype: torch.dtype | str, trust_remote_code: bool, attention: str | None
) -> nn.Module:
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if attention is not None:
        options["attn_implementation"] = attention
    model: nn.Module = factory.from_pretrained(source, **options)
    return model


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` as it is now, whose parameters take no gradient: a reference policy."""
    frozen = copy.deepcopy(model)
    return freeze(frozen)


def freeze(model: nn.Module) -> nn.Module:
    """`model` itself, in evaluation mode and without gradients."""
    return model.requires_grad_(False).eval()


def prepare_for_training(model: nn.Module, *, gradient_checkpointing: bool) -> None:
    """Puts a network into the one mode it is trained and scored in: no dropout, no cache.

    Dropout would make the policy that is updated another one than the policy that acted, and would need
    random state in checkpoints.  With gradient checkpointing only the checkpointed layers are told that they
    train; their dropout and attention modules are not.
    """
    model.eval()
    if not gradient_checkpointing:
        return
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise ValueError(f"{type(model).__name__} does not support gradient checkpointing")
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def hidden_size_of(model: nn.Module) -> int:
    """Width of the hidden states that a Hugging Face model's value head reads."""
    config: Any = model.config
    return int(config.get_text_config().hidden_size)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of a network's parameters."""
    return next(model.parameters()).dtype


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """What a network's files hold besides its parameters."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
