"""Both ends of a wire cut the parts of a bucket alike, and each byte is in one run."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_magistral.weights.parts import (
    LARGE_BYTES,
    RUN_BYTES,
    Part,
    View,
    pack,
    parts_of,
    runs,
    unpack,
)

SIZES = st.lists(st.integers(1, 2 * LARGE_BYTES), max_size=40)


def part(number: int, num_bytes: int) -> Part:
    return Part(f"t{number}", View((num_bytes,), (1,), 0), num_bytes)


@given(SIZES)
def test_every_part_is_in_one_run_the_small_ones_first_and_runs_are_bounded(
    sizes: list[int],
) -> None:
    parts = [part(i, size) for i, size in enumerate(sizes)]
    cut = list(runs(parts))
    small = [each for each in parts if each.num_bytes < LARGE_BYTES]
    large = [each for each in parts if each.num_bytes >= LARGE_BYTES]
    assert [each for run in cut for each in run] == small + large
    for run in cut:
        assert len(run) == 1 or sum(each.num_bytes for each in run) <= RUN_BYTES


@given(SIZES)
def test_a_large_part_travels_alone(sizes: list[int]) -> None:
    for run in runs(part(i, size) for i, size in enumerate(sizes)):
        assert len(run) == 1 or all(each.num_bytes < LARGE_BYTES for each in run)


def test_copies_of_the_same_elements_travel_once() -> None:
    first, second = View((2,), (1,), 0), View((2,), (1,), 2)
    assert [p.view for p in parts_of("t", [first, second, first], 2)] == [first, second]


def test_what_is_packed_is_unpacked_whatever_the_dtypes_and_strides() -> None:
    tensors = [
        torch.rand(3, 5).t(),
        torch.rand(3).to(torch.bfloat16),  # leaves what follows unaligned for its dtype
        torch.rand(7, dtype=torch.float64),
        torch.arange(4, dtype=torch.int8),
    ]
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    data = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    pack(tensors, data)
    unpack(data, targets)
    assert all(map(torch.equal, tensors, targets))
