"""Small networks of many agents, stacked: one flat parameter row per agent, one batched call for all of them.

Owns the layout of a flat row and the forward pass over a stack.  Knows neither actors nor critics.  A row holds each
layer's weight `[out, in]` row by row, then its bias, layer after layer, which is the order of a `torch.nn.Sequential`
of linear layers; rows travel between processes and are what soft updates work on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MLPShape:
    """Sizes of a multilayer perceptron: linear layers with ReLU between them, nothing after the last."""

    sizes: tuple[int, ...]
    """Input, hidden layers, output."""

    @property
    def num_parameters(self) -> int:
        return sum(out * (into + 1) for into, out in self._layers())

    def _layers(self) -> list[tuple[int, int]]:
        return list(zip(self.sizes[:-1], self.sizes[1:], strict=True))

    def split(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of `rows` [K, P] as each layer's weights [K, out, in] and biases [K, out]."""
        views, start = [], 0
        for into, out in self._layers():
            weight = rows[:, start : start + out * into].reshape(-1, out, into)
            start += out * into
            views.append((weight, rows[:, start : start + out]))
            start += out
        return views

    def forward(self, rows: Tensor, inputs: Tensor) -> Tensor:
        """Outputs [K, B, out] of K networks on K batches [K, B, in]."""
        hidden = inputs
        layers = self.split(rows)
        for index, (weight, bias) in enumerate(layers):
            hidden = torch.baddbmm(bias.unsqueeze(1), hidden, weight.transpose(1, 2))
            if index + 1 < len(layers):
                hidden = hidden.relu()
        return hidden

    def initial_row(self, rng: np.random.Generator) -> np.ndarray:
        """A random row: uniform within `1 / sqrt(in)`, as `torch.nn.Linear` starts; float64 [P]."""
        parts = []
        for into, out in self._layers():
            bound = 1 / math.sqrt(into)
            parts.append(rng.uniform(-bound, bound, out * into + out))
        return np.concatenate(parts)

    def flatten(self, layers: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """The row of one network given as (weight [out, in], bias [out]) of each layer."""
        return np.concatenate([np.concatenate([np.ravel(weight), np.ravel(bias)]) for weight, bias in layers])
