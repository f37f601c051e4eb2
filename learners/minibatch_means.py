"""Means of what micro-batches report, per mini-batch and per update.

This module owns the bookkeeping of losses and metrics.  It must not know what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class MiniBatchMeans:
    """Sums micro-batch means into mini-batch means on the device, and reads them out once, at the end.

    Every read of a number from an accelerator waits for it; a metric must not cost a wait per micro-batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[str, Tensor] = {}
        self._closed: dict[str, list[Tensor]] = {}
        self._sizes: list[int] = []

    def add(self, share: float, **numbers: Tensor | float) -> None:
        """Adds means over a micro-batch that is `share` of the mini-batch."""
        for name, number in numbers.items():
            term = torch.as_tensor(number, dtype=torch.float64, device=self._device).detach() * share
            self._open[name] = self._open[name] + term if name in self._open else term

    def current(self, name: str) -> Tensor:
        """The open mini-batch's mean of `name` so far."""
        return self._open[name]

    def reduce(self, total: Callable[[Tensor], Tensor]) -> None:
        """Takes the open mini-batch's micro-batches on other ranks in; `total` sums a tensor over all ranks."""
        if self._open:
            sums = total(torch.stack(list(self._open.values())))
            self._open = dict(zip(self._open, sums.unbind(), strict=True))

    def close(self, size: int) -> None:
        """Ends a mini-batch of `size` samples."""
        for name, number in self._open.items():
            self._closed.setdefault(name, []).append(number)
        self._open = {}
        self._sizes.append(size)

    def per_minibatch(self, name: str) -> list[float]:
        """The mean of every closed mini-batch; empty for a name never added."""
        numbers = self._closed.get(name)
        return [] if not numbers else [float(x) for x in torch.stack(numbers).tolist()]

    def mean(self, name: str, *, per_sample: bool = True) -> float:
        """Mean over all samples (or, with `per_sample` False, over all mini-batches); 0 where there was
        none."""
        numbers = self.per_minibatch(name)
        weights = self._sizes if per_sample else [1] * len(numbers)
        if not numbers:
            return 0.0
        return sum(w * x for w, x in zip(weights, numbers, strict=True)) / sum(weights)
