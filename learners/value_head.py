"""The value head: from a hidden state to one number.

This module owns the head's shape, initialisation and file.  It must not know which hidden state it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FILE_NAME = "value_head.safetensors"
"""The head's file, beside the Hugging Face files of a critic, or in a folder of its own below those of a policy."""


class ValueHead(nn.Module):
    """Optional Linear + Tanh of `head_hidden` units, then Linear to 1.

    Computes in its own precision, whatever the hidden states come in: float32 beside half-precision models,
    whose eight bits of mantissa would round a value to a percent.
    """

    def __init__(self, hidden_size: int, head_hidden: int | None = None, *, seed: int = 0) -> None:
        """Initialises with the distribution of `nn.Linear`, from `seed` alone: no global random state is
        read."""
        super().__init__()
        self.hidden_projection = None if head_hidden is None else nn.Linear(hidden_size, head_hidden)
        self.value_projection = nn.Linear(hidden_size if head_hidden is None else head_hidden, 1)
        generator = torch.Generator().manual_seed(seed)
        for layer in filter(None, (self.hidden_projection, self.value_projection)):
            bound = 1.0 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values [...] of hidden states [..., hidden_size]."""
        hidden = hidden.to(self.value_projection.weight.dtype)
        if self.hidden_projection is not None:
            hidden = torch.tanh(self.hidden_projection(hidden))
        value: Tensor = self.value_projection(hidden)
        return value.squeeze(-1)

    def save(self, directory: str | Path) -> None:
        """Writes the head's weights into `directory`."""
        save_head(self.state_dict(), directory)

    @classmethod
    def load(cls, directory: str | Path) -> ValueHead:
        """The head saved in `directory`, its shape read from the tensors.  FileNotFoundError where there is
        none."""
        tensors = load_file(str(Path(directory) / FILE_NAME))
        hidden = tensors.get("hidden_projection.weight")
        width = tensors["value_projection.weight"].shape[1]
        head = cls(width) if hidden is None else cls(hidden.shape[1], hidden.shape[0])
        head.to(tensors["value_projection.weight"].dtype).load_state_dict(tensors)
        return head


def save_head(state: Mapping[str, Tensor], directory: str | Path) -> None:
    """Writes the weights of a head, given as its `state_dict`, into `directory`."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in state.items()}
    save_file(tensors, str(Path(directory) / FILE_NAME))
