"""Tensors that go over gloo in buckets arrive as they were sent."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learners.gloo_wire import GlooWire, Header, plan_buckets

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
headers = st.lists(st.tuples(st.just("w"), st.sampled_from(TYPES), shapes), max_size=30)


@given(headers, st.integers(1, 400))
def test_buckets_cover_every_tensor_once_and_keep_within_their_size(
    headers: list[Header], bucket_bytes: int
) -> None:
    buckets = plan_buckets(headers, bucket_bytes)
    assert [index for bucket in buckets for index in range(bucket.start, bucket.stop)] == list(
        range(len(headers))
    )
    for bucket in buckets:
        inside = headers[bucket]
        assert len({dtype for _, dtype, _ in inside}) == 1
        size = sum(prod(shape) * dtype.itemsize for _, dtype, shape in inside)
        assert size <= bucket_bytes or len(inside) == 1


def test_a_bucket_is_left_only_when_it_is_full_or_the_type_changes() -> None:
    four = ("w", torch.float32, (1,))
    two = ("w", torch.bfloat16, (1,))
    assert plan_buckets([four, four, four, two, two, four], 8) == [
        slice(0, 2), slice(2, 3), slice(3, 5), slice(5, 6),
    ]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("receivers", [1, 2])
def test_what_arrives_is_what_was_sent_bit_for_bit(receivers: int) -> None:
    sent = {
        "half": torch.randn(5, 3).bfloat16(),
        "turned": torch.randn(4, 6).T,  # not contiguous
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 2),
        "large": torch.randn(100),
        "ids": torch.arange(7),
    }
    headers = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()]
    place = ("127.0.0.1", free_port())

    def end(rank: int) -> list[dict[str, torch.Tensor]]:
        wire = GlooWire(place, rank, receivers + 1, bucket_bytes=96, timeout_s=30)
        passes = []
        for _ in range(2):  # a connection serves many pushes
            if rank == 0:
                wire.send(headers, iter(sent.values()))
            else:
                passes.append({name: t.clone() for part in wire.receive(headers) for name, t in part})
        wire.close()
        return passes

    with ThreadPoolExecutor(receivers + 1) as threads:
        _, *received = threads.map(end, range(receivers + 1))
    for passes in received:
        assert len(passes) == 2
        for arrived in passes:
            assert arrived.keys() == sent.keys()
            for name, tensor in sent.items():
                assert arrived[name].dtype == tensor.dtype
                assert torch.equal(arrived[name], tensor)


def test_a_receiver_that_does_not_come_ends_the_wait() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
        GlooWire(("127.0.0.1", free_port()), 0, 2, bucket_bytes=96, timeout_s=1)
