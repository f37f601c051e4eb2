"""A policy's weights straight from its learner's device into its engines, through vLLM's weight transfer.

Owns the learner's end: what is sent, and the connection, which is made anew whenever the engines at its other end are
others.  vLLM moves the tensors (NCCL between GPUs, CUDA IPC on one GPU); on CPUs `GlooWire` does.  Imports vLLM, so it
is imported only where weights travel this way.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from learners.gloo_wire import GlooWire, Header
from learners.snapshot import TransferSpec, WeightTransferError

WeightTransferTrainerFactory.register_engine("gloo", __name__, "GlooSender")

Named = Iterator[tuple[str, Tensor]]

_GRACE_S = 10.0
"""How long the death of an engine may take to be known after its line is dead."""


class PolicySource(WeightSource):  # type: ignore[misc]
    """vLLM's view of a policy's weights.

    Args:
        weights: a new pass over all of them, whole, one at a time; with several ranks, each of them has to finish it.
    """

    def __init__(self, weights: Callable[[], Named]) -> None:
        self._weights = weights
        self._metadata: list[ParamMeta] | None = None
        self._pass: Named | None = None

    def metadata(self) -> list[ParamMeta]:
        if self._metadata is None:
            self._metadata = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._weights()]
        return self._metadata

    def __iter__(self) -> Named:
        self._pass = self._weights()
        yield from self._pass

    def begin(self) -> None:
        """One pass is about to be made."""
        self._pass = None

    def finish(self) -> None:
        """Finish the pass that a failure has broken off, or never let begin: other ranks are waiting in it."""
        for _ in self._weights() if self._pass is None else self._pass:
            pass


class WeightSender:
    """One rank's end of the connection to an agent's engines."""

    def __init__(
        self, spec: TransferSpec, weights: Callable[[], Named], rank: int, device: torch.device
    ) -> None:
        self._spec, self._rank = spec, rank
        if device.type == "cuda":
            torch.cuda.set_device(device)  # vLLM sends from the current one
        self._source = PolicySource(weights)
        self._source.metadata()  # a pass of its own: here, where all ranks make it
        self._transfer: Any = None
        self._connected: tuple[list[Any], int] | None = None

    def send(self, engines: Sequence[Any], incarnation: int) -> None:
        """Bring `engines` (actors) to the present weights.

        `incarnation` changes whenever one of them has become another process.

        Raises:
            WeightTransferError: it broke off; the engines that took part are in no state to go on.
        """
        self._source.begin()
        try:
            if self._connected != (list(engines), incarnation):
                self.close()
                self._transfer = self._connect(engines)
                self._connected = (list(engines), incarnation)
            self._transfer.send_weights()
        except Exception as error:
            self.close()
            raise WeightTransferError(
                f"weights could not be sent to {len(engines)} engines with engine.weight_transfer="
                f"{self._spec.backend}: {error}"
            ) from error
        finally:
            if self._connected is None:
                self._source.finish()

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.shutdown()
        self._transfer = self._connected = None

    def _connect(self, engines: Sequence[Any]) -> Any:
        spec = self._spec
        client = _Engines(engines, spec, self._break_off)
        size = 1 + len(engines) * spec.ranks_per_engine
        return WeightTransferTrainerFactory.trainer_init(
            _init_info(spec, self._rank, size), client=client, source=self._source
        )

    def _break_off(self) -> None:
        """An engine has failed while this side waits for it in a collective: NCCL lets go when it is aborted."""
        if self._transfer is not None:
            self._transfer.shutdown()


class _Aside:
    """A call in a thread of its own while the body runs.

    Where both fail, the call's error is raised: it knows which engine is lost, the body only that the line is dead.
    """

    def __init__(self, call: Callable[..., None], *arguments: Any) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._answer = self._thread.submit(call, *arguments)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._thread.shutdown(wait=False)
        if error is None or wait([self._answer], timeout=_GRACE_S).done:
            self._answer.result()


class _Engines(VLLMWeightSyncClient):  # type: ignore[misc]
    """vLLM's control plane over the generation workers, which are Ray actors."""

    def __init__(self, engines: Sequence[Any], spec: TransferSpec, on_failure: Callable[[], None]) -> None:
        self._engines, self._spec, self._on_failure = list(engines), spec, on_failure

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        offsets = range(1, 1 + len(self._engines) * self._spec.ranks_per_engine, self._spec.ranks_per_engine)
        meets = "rank_offset" in init_info  # IPC knows no ranks
        self._all(
            "init_weight_transfer_engine",
            [{**init_info, "rank_offset": at} if meets else init_info for at in offsets],
        )

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", [update_info] * len(self._engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update")

    def _all(self, step: str, arguments: Sequence[Any] | None = None) -> None:
        each = [()] * len(self._engines) if arguments is None else [(argument,) for argument in arguments]
        refs = [engine.transfer.remote(step, *own) for engine, own in zip(self._engines, each, strict=True)]
        try:
            ray.get(refs, timeout=self._spec.timeout_s)
        except (RayError, GetTimeoutError) as error:
            self._on_failure()
            late = "" if not isinstance(error, GetTimeoutError) else f"waited {self._spec.timeout_s:g} s; "
            raise WeightTransferError(f"{step}: {late}{error}") from error


def _init_info(spec: TransferSpec, rank: int, size: int) -> TrainerInitInfo:
    """The description from which vLLM builds this rank's end."""
    if spec.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=spec.bucket_bytes)
    place = {
        "master_address": ray.util.get_node_ip_address(),
        "master_port": _free_port(),
        "world_size": size,
    }
    if spec.backend == "gloo":
        return GlooTrainerInitInfo(
            rank=rank, **place, bucket_bytes=spec.bucket_bytes, timeout_s=spec.timeout_s
        )
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(rank=rank, **place, packed=True, packed_buffer_size_bytes=spec.bucket_bytes)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The learner's end over gloo."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    master_port: int
    world_size: int
    bucket_bytes: int
    timeout_s: float


class GlooSender(TrainerWeightTransferEngine[GlooTrainerInitInfo]):  # type: ignore[misc]
    """What vLLM's NCCL sender does, on CPUs."""

    init_info_cls = GlooTrainerInitInfo
    _wire: GlooWire | None = None

    @classmethod
    def trainer_init(
        cls,
        init_info: GlooTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        sender = cls(client=client, source=source, is_sender=init_info.is_sender)
        if sender.is_sender:
            info = {**asdict(init_info), "rank_offset": 1}
            del info["rank"]
            with _Aside(client.init_weight_transfer_engine, info):  # both sides wait for one another
                sender._wire = GlooWire(
                    (init_info.master_address, init_info.master_port),
                    0,
                    init_info.world_size,
                    bucket_bytes=init_info.bucket_bytes,
                    timeout_s=init_info.timeout_s,
                )
        return sender

    def send_weights(self) -> None:
        assert self.source is not None
        headers: list[Header] = [(m.name, m.dtype, m.shape) for m in self.source.metadata()]
        if self._wire is None:
            for _ in self.source:  # the leading rank needs this one's parts
                pass
            return
        self.client.start_weight_update()
        with _Aside(self.client.update_weights, {"headers": headers}):
            self._wire.send(headers, (tensor for _, tensor in self.source))
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
