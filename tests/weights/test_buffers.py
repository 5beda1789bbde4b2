"""Memory for buckets: two buffers in turn."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_magistral.weights.buffers import TurnBuffers, wire_buffer

CPU = torch.device("cpu")


def test_a_bucket_outlives_the_next_one_and_gives_its_memory_to_the_one_after() -> None:
    buffers = TurnBuffers()
    first = buffers.take(10, torch.float32, CPU).fill_(1)
    second = buffers.take(8, torch.bfloat16, CPU).fill_(2)
    assert first.shape == (10,) and second.shape == (8,)
    assert first.eq(1).all() and second.eq(2).all()
    third = buffers.take(9, torch.float32, CPU)
    assert third.data_ptr() == first.data_ptr()
    assert second.eq(2).all()


def test_a_larger_bucket_gets_a_larger_buffer() -> None:
    buffers = TurnBuffers()
    small = [buffers.take(4, torch.uint8, CPU).fill_(n) for n in range(2)]
    large = buffers.take(400, torch.uint8, CPU)
    assert large.shape == (400,) and small[1].eq(1).all()
    assert buffers.take(4, torch.uint8, CPU).data_ptr() == small[1].data_ptr()


def test_on_a_cpu_buffers_stay_for_the_next_update() -> None:
    buffers = TurnBuffers()
    of_one_update = {buffers.take(4, torch.uint8, CPU).data_ptr() for _ in range(2)}
    buffers.rest()
    assert {buffers.take(4, torch.uint8, CPU).data_ptr() for _ in range(2)} == of_one_update


def test_on_other_devices_buffers_go_back_to_torch_between_updates() -> None:
    buffers = TurnBuffers()
    memory = StorageWeakRef(buffers.take(4, torch.uint8, torch.device("meta")).untyped_storage())
    assert not memory.expired()
    buffers.rest()
    assert memory.expired()


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    view = wire_buffer(1 << 20, CPU).fill_(7)[5:9]
    assert view.tolist() == [7] * 4 and wire_buffer(0, CPU).numel() == 0
