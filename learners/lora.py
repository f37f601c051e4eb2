"""Low-rank adapters in a policy's model: what trains in place of its weights.

Owns how adapters get into a model, what the weights are with the adapters merged in, and the adapters' files.  Must not
know losses, optimisers or engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from learners.ranks import whole

_ADAPTER = "default"
_BASE = ".base_layer."


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """The adapters' shape; travels to the learner's process."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...] | None = None
    """Names of linear layers, or their endings; None: every linear layer but the output head."""


class LoraAdapter:
    """Adapters inside `model`, whose own weights are frozen from here on.

    The model goes on being called as before; its adapted layers add `alpha / rank * B A x` to what they compute.
    """

    def __init__(self, model: nn.Module, spec: LoraSpec, *, seed: int) -> None:
        """Adapters start from `seed` alone, and add nothing before their first step: B is 0.

        Raises:
            ValueError: an adapted layer shares its weight with another, so that a merged weight would change both.
        """
        # Takes seconds to import; only runs that use it should wait.
        from peft import LoraConfig, get_peft_model
        from peft.tuners.lora import LoraLayer
        from transformers.pytorch_utils import Conv1D

        settings = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            target_modules="all-linear" if spec.target_modules is None else list(spec.target_modules),
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._peft: Any = get_peft_model(model, settings)
        self._model = model
        self._layers: dict[str, Any] = {
            f"{name}.base_layer.weight": module
            for name, module in model.named_modules()
            if isinstance(module, LoraLayer)
        }
        tied = sorted(name for name in self._layers if _is_shared(model, name))
        if tied:
            raise ValueError(
                f"LoRA cannot adapt {', '.join(name.replace(_BASE, '.') for name in tied)}: it is tied to another layer"
            )

    def trained(self) -> dict[str, nn.Parameter]:
        """The adapters' parameters, by their names in the model."""
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The model's weights under the names that it has without adapters, `W + alpha / rank * B A` where there is
        one; nothing that trains is touched."""
        adapters = self.trained()
        for name, parameter in self._model.named_parameters():
            if name in adapters:
                continue
            layer = self._layers.get(name)
            weight = whole(parameter.detach())
            yield name.replace(_BASE, "."), weight if layer is None else _merge(weight, layer)

    def disabled(self) -> AbstractContextManager[None]:
        """While it lasts, the model computes what it computed before it had adapters."""
        without: AbstractContextManager[None] = self._peft.disable_adapter()
        return without

    def save(self, trained: Mapping[str, Tensor], directory: str | Path) -> None:
        """Writes the adapters' parameters, given whole by their names in the model, in the layout of peft."""
        state = {f"base_model.model.{name}": tensor for name, tensor in trained.items()}
        self._peft.save_pretrained(str(directory), state_dict=state, save_embedding_layers=False)


def _merge(weight: Tensor, layer: Any) -> Tensor:
    """In the wider precision of the two: a half-precision sum would lose what adapters have learned first."""
    with torch.no_grad():
        a, b = (whole(part[_ADAPTER].weight) for part in (layer.lora_A, layer.lora_B))
        delta: Tensor = (b @ a) * layer.scaling[_ADAPTER]
        if layer.fan_in_fan_out:
            delta = delta.T
        precision = torch.promote_types(weight.dtype, delta.dtype)
        return (weight.to(precision) + delta.to(precision)).to(weight.dtype)


def _is_shared(model: nn.Module, name: str) -> bool:
    weight = model.get_parameter(name)
    return sum(p is weight for _, p in model.named_parameters(remove_duplicate=False)) > 1
