"""How new weights get into a running vLLM engine."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class StaleWeightsError(RuntimeError):
    """A worker was asked to sample with a weight version that it does not hold."""


class WeightPush:
    """vLLM worker extension: replaces the weights of a running engine.

    `model.load_weights` fails on a live model because weights are repacked after loading; the worker's
    `reload_weights` undoes and redoes that repacking.
    """

    def push(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.reload_weights(weights_iterator=iter(named_tensors))  # type: ignore[attr-defined]
