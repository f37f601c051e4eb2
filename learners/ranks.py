"""The ranks over which one learner is spread: their process group, sharded networks, and what ranks tell one another.

Owns `torch.distributed` and FSDP2.  Must not know losses, batches or Ray.  A learner alone in its process is the plain
case: nothing is sharded, nothing is sent, and every number is what it would be without this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the ranks of its learner.  All ranks make the same calls in the same order."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """None: alone."""

    @property
    def leads(self) -> bool:
        """Whether what this rank answers and writes is what counts."""
        return self.rank == 0

    def place(self, network: nn.Module, device: torch.device) -> nn.Module:
        """Bring a network to where it is used: to `device`, or of every parameter this rank's part.

        Sharding goes decoder layer by decoder layer, so that no device ever holds the whole.  A parameter's gradient
        becomes the mean of the ranks' gradients.
        """
        if self.mesh is None:
            return network.to(device)
        names = set(getattr(network, "_no_split_modules", None) or ())
        # Gradients of half precision are summed in float32, like those of micro-batches.
        options: Any = {"mesh": self.mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
        if next(network.parameters()).dtype == torch.float64:
            options.pop("mp_policy")
        for module in [m for m in network.modules() if type(m).__name__ in names]:
            fully_shard(module, **options)
        # The outermost part is not left whole after a forward pass: between calls every parameter is sharded.
        fully_shard(network, reshard_after_forward=True, **options)
        return network

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.mesh is None:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def sum_array(self, array: NDArray[Any]) -> NDArray[Any]:
        """The sum over all ranks; exact where only one rank's number is not 0."""
        return array if self.mesh is None else self.sum(torch.from_numpy(array)).numpy()

    def union(self, mapping: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
        """The entries of all ranks."""
        if self.mesh is None:
            return dict(mapping)
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, dict(mapping))
        return {key: value for part in parts for key, value in part.items()}

    def gather(self, tensor: Tensor) -> Tensor:
        """The whole tensor of which each rank has a part, on the CPU of the rank that leads; elsewhere nothing.

        A tensor that is not sharded is returned as it is.
        """
        if not isinstance(tensor, DTensor):
            return tensor
        complete = whole(tensor)
        return complete.cpu() if self.leads else complete.new_empty(0)

    def gather_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`gather` of each; a dictionary of what is not sharded stays what it was."""
        return {name: self.gather(tensor) for name, tensor in tensors.items()}

    def load(self, network: nn.Module, complete: Mapping[str, Tensor], *, strict: bool = True) -> None:
        """Take whole tensors over into a network, sharded or not."""
        live = network.state_dict()
        parts = {name: self.share(t, live[name]) if name in live else t for name, t in complete.items()}
        network.load_state_dict(parts, strict=strict)

    def share(self, complete: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a tensor, cut as `like` is; the tensor itself where `like` is not sharded."""
        if not isinstance(like, DTensor):
            return complete
        here = complete.to(like.device, like.dtype)
        # A copy: the whole may be a file's memory.
        return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None).clone()


ALONE = Ranks()


def open_store(host: str, size: int, timeout_s: float) -> Any:
    """The meeting place of a group, on a free port of this machine; rank 0 keeps it."""
    return _store(host, 0, size, timeout_s, is_master=True)


def reach_store(host: str, port: int, size: int, timeout_s: float) -> Any:
    """The meeting place that rank 0 opened.

    Raises:
        RuntimeError: it was not there within `timeout_s`.
    """
    try:
        return _store(host, port, size, timeout_s, is_master=False)
    except dist.DistError as error:
        raise RuntimeError(f"waited {timeout_s:g} s for rank 0 at {host}, port {port}: {error}") from error


def _store(host: str, port: int, size: int, timeout_s: float, *, is_master: bool) -> Any:
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    limit = timedelta(seconds=timeout_s)
    return make(host, port, size, is_master=is_master, timeout=limit, wait_for_workers=False)


def join(
    store: Any, rank: int, size: int, device: str, *, start_timeout_s: float, call_timeout_s: float
) -> Ranks:
    """Become one of `size` ranks; one process can do that once.

    Raises:
        RuntimeError: not all ranks were there within `start_timeout_s`.
    """
    store.set_timeout(timedelta(seconds=start_timeout_s))
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(torch.device(device))
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    missing = _missing(store, rank, size)
    if missing:
        raise RuntimeError(
            f"waited {start_timeout_s:g} s for rank {missing[0]} of {size}; it is still not there"
        )
    limit = timedelta(seconds=call_timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    return Ranks(rank, size, init_device_mesh(kind, (size,)))


def _missing(store: Any, rank: int, size: int) -> list[int]:
    """Ranks that did not come."""
    store.set(f"here/{rank}", "")
    for other in range(size):
        try:
            store.wait([f"here/{other}"])
        except dist.DistStoreError:
            return [other]
    return []


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank has a part, on every rank; a tensor that is not sharded, as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, over the same memory; a tensor that is not sharded, as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm_of(tensors: list[Tensor]) -> Tensor:
    """L2 norm over all numbers of `tensors`, sharded or not."""
    return whole(torch.nn.utils.get_total_norm(tensors)) if tensors else torch.zeros(())
