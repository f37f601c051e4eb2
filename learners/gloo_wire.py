"""Whole tensors from one process to several over gloo, in buckets: what NCCL does between GPUs, for processes on CPUs.

Owns how tensors are cut into buckets and how the processes meet.  Both sides cut by the same names, types and shapes,
so the buckets themselves carry bytes and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import islice
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Header = tuple[str, torch.dtype, tuple[int, ...]]
"""Name, type and shape of a tensor on its way."""


_MEETING_S = 60.0


def plan_buckets(headers: Sequence[Header], bucket_bytes: int) -> list[slice]:
    """Runs of tensors of one type that are at most `bucket_bytes` together; a larger tensor has one to itself."""
    buckets: list[slice] = []
    start = filled = 0
    for index, (_, dtype, shape) in enumerate(headers):
        size = prod(shape) * dtype.itemsize
        if index > start and (dtype != headers[start][1] or filled + size > bucket_bytes):
            buckets.append(slice(start, index))
            start, filled = index, 0
        filled += size
    return [*buckets, slice(start, len(headers))] if headers else []


class GlooWire:
    """A process's end of the wire; rank 0 sends, all others receive.

    Args:
        place: host and port at which rank 0 opens the meeting place.
        timeout_s: limit of every bucket; the meeting's is a minute at most.

    Raises:
        RuntimeError: the others were not there in time.
    """

    def __init__(
        self, place: tuple[str, int], rank: int, size: int, *, bucket_bytes: int, timeout_s: float
    ) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        # Not torch's default group, which belongs to the learner's ranks here and to the engine's there.
        self._group: Any = stateless_init_torch_distributed_process_group(
            *place, rank, size, "gloo", timeout=timedelta(seconds=min(timeout_s, _MEETING_S))
        )
        self._bucket_bytes, self._limit = bucket_bytes, timedelta(seconds=timeout_s)

    def send(self, headers: Sequence[Header], tensors: Iterable[Tensor]) -> None:
        """Send tensors, which may be put together one at a time, in the order of `headers`."""
        left = iter(tensors)
        for bucket in plan_buckets(headers, self._bucket_bytes):
            count = bucket.stop - bucket.start
            flat = torch.cat([tensor.detach().cpu().reshape(-1) for tensor in islice(left, count)])
            self._broadcast(flat)

    def receive(self, headers: Sequence[Header]) -> Iterator[list[tuple[str, Tensor]]]:
        """What `send` has sent, bucket by bucket."""
        for bucket in plan_buckets(headers, self._bucket_bytes):
            inside = headers[bucket]
            sizes = [prod(shape) for _, _, shape in inside]
            flat = torch.empty(sum(sizes), dtype=inside[0][1])
            self._broadcast(flat)
            parts = torch.split(flat, sizes)
            yield [(name, part.view(shape)) for (name, _, shape), part in zip(inside, parts, strict=True)]

    def close(self) -> None:
        self._group.shutdown()

    def _broadcast(self, flat: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._limit
        # As bytes: gloo does not know all types of torch.
        self._group.broadcast([flat.view(torch.uint8)], options).wait()
