"""How new weights get into a running vLLM engine: the engine's end.  Imports vLLM.

A snapshot's tensors are loaded by `WeightPush`; weights that come straight from a learner arrive through vLLM's weight
transfer, to which `GlooReceiver` adds a way between CPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from learners.gloo_wire import GlooWire, Header

# vLLM imports this module for `WeightPush` in every process of an engine, before it looks for the engine's transfer.
WeightTransferEngineFactory.register_engine("gloo", __name__, "GlooReceiver")


class WeightPush:
    """vLLM worker extension: replaces the weights of a running engine.

    `model.load_weights` fails on a live model because weights are repacked after loading; the worker's
    `reload_weights` undoes and redoes that repacking.
    """

    def push(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.reload_weights(weights_iterator=iter(named_tensors))  # type: ignore[attr-defined]


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the learner is met; see `learners.weight_sender.GlooTrainerInitInfo`."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int
    bucket_bytes: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What is coming."""

    headers: list[Header]


class GlooReceiver(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):  # type: ignore[misc]
    """What vLLM's NCCL receiver does, on CPUs."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _wire: GlooWire | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        self._wire = GlooWire(
            (init_info.master_address, init_info.master_port),
            init_info.rank_offset + self.parallel_config.rank,
            init_info.world_size,
            bucket_bytes=init_info.bucket_bytes,
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base class's: that waits for an accelerator.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        assert self._wire is not None, "weights came before the learner was met"
        for bucket in self._wire.receive(update_info.headers):
            self.model.load_weights(bucket)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
