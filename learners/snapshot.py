"""One version of a policy's weights on its way into generation engines, with the proof that it arrived.

Owns the form in which weights travel; knows neither engine nor optimiser.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from learners.samples import FloatArray, IntArray

NumpyTensors = dict[str, tuple[str, np.ndarray[Any, Any]]]
"""Parameter name -> (torch dtype name, array); bfloat16, which numpy lacks, travels as uint16."""


class WeightSyncError(RuntimeError):
    """An engine does not compute what the learner computes after a push."""


class WeightTransferError(RuntimeError):
    """Weights that were sent straight to engines did not get there; those engines hold neither old nor new ones."""


@dataclass(frozen=True, slots=True)
class TransferSpec:
    """How one agent's weights travel."""

    backend: Literal["nccl", "ipc", "gloo"]
    ranks_per_engine: int
    """vLLM's `tensor_parallel_size`."""
    bucket_bytes: int
    timeout_s: float


@dataclass(slots=True)
class WeightSnapshot:
    """One version of a policy's weights, with a probe that tells whether an engine really uses them.

    Arrays are pickled out of band, so Ray copies each once into its object store and every engine on that node reads
    the same memory.
    """

    version: int
    tensors: NumpyTensors | None
    """None: they have been sent to the engines another way."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Tied parameters: name -> name in `tensors`.  vLLM's CPU build repacks the output layer into a copy of its own,
    so a tied `lm_head` must be pushed by name too; sending an alias costs nothing."""
    probe_ids: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    probe_logprobs: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    """The learner's log-probabilities of `probe_ids[1:]` under these weights."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter as a tensor over the snapshot's own (read-only) memory."""
        assert self.tensors is not None, "these weights do not travel with their snapshot"
        for name, (dtype, array) in self.tensors.items():
            yield name, _as_tensor(dtype, array)
        for name, source in self.aliases.items():
            yield name, _as_tensor(*self.tensors[source])

    def check(self, engine_logprobs: FloatArray, tolerance: float) -> float:
        """Largest difference between engine and learner on the probe.

        Raises:
            WeightSyncError: the difference is above `tolerance`, or not a number.
        """
        if not len(self.probe_logprobs):
            return 0.0
        gap = float(np.max(np.abs(engine_logprobs - self.probe_logprobs)))
        if not gap <= tolerance:  # a NaN must fail too
            raise WeightSyncError(
                f"weight version {self.version} was pushed, but the engine's log-probabilities differ from the "
                f"learner's by up to {gap:.3g} (tolerance {tolerance:.3g}): the engine does not sample with these "
                "weights. Check that engine and learner use the same model and dtype, or raise "
                "`engine.logprob_tolerance` for half-precision models."
            )
        return gap


def _as_tensor(dtype: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        # Object-store memory is read-only; engines copy out of it and never write.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
