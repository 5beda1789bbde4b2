"""The digest of weights, and which tensors are checked when."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_magistral.weights import checksum
from megatron_magistral.weights.checksum import (
    HEAD_BYTES,
    ChecksumSettings,
    digest,
    head,
    names_to_check,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)
SETTINGS = ChecksumSettings(sample_stride=4, full_every=10)


def a_tensor(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 61).view(5, 12).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 59), st.integers(0, 7))
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype, place: int, bit: int) -> None:
    tensor = a_tensor(dtype)
    before = int(digest(tensor))
    tensor.view(-1)[place : place + 1].view(torch.uint8)[0] ^= 1 << bit
    assert int(digest(tensor)) != before


@given(st.integers(0, 59), st.integers(0, 59))
def test_swapped_elements_change_the_digest(i: int, j: int) -> None:
    tensor = a_tensor()
    swapped = tensor.clone()
    swapped.view(-1)[[i, j]] = swapped.view(-1)[[j, i]]
    assert (int(digest(tensor)) == int(digest(swapped))) == (i == j)


@pytest.mark.parametrize("scale", [-1.0, 2.0])
def test_elements_that_differ_in_upper_bits_alone_cannot_change_places(scale: float) -> None:
    """A sign, or an exponent by one."""
    tensor = a_tensor().view(-1)
    for i in range(1, 60, 2):  # the upper half of each lane
        for j in range(i + 2, 60, 2):
            pair = tensor.clone()
            pair[j] = pair[i] * scale
            swapped = pair.clone()
            swapped[[i, j]] = pair[[j, i]]
            assert int(digest(pair)) != int(digest(swapped))


def test_a_view_has_the_digest_of_its_copy() -> None:
    columns = a_tensor()[:, 3:7]
    assert int(digest(columns)) == int(digest(columns.clone()))
    assert int(digest(columns)) != int(digest(columns.t()))


def test_the_digest_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(5 * 2 * checksum.BLOCK_LANES + 3)
    whole = int(digest(tensor))
    monkeypatch.setattr(checksum, "BLOCKS_AT_A_TIME", 2)
    assert int(digest(tensor)) == whole


def test_a_cpu_and_other_devices_take_the_same_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(300_001).to(torch.bfloat16)
    expected = digest(weights)
    monkeypatch.setattr(checksum, "_weighted", checksum._weighted_anywhere)
    assert digest(weights) == expected


def test_blocks_of_equal_content_cannot_change_places() -> None:
    tensor = torch.randn(2 * 2 * checksum.BLOCK_LANES)
    first, second = tensor.chunk(2)
    assert int(digest(tensor)) != int(digest(torch.cat([second, first])))


def test_a_view_at_an_odd_place_has_the_digest_of_its_copy() -> None:
    view = torch.randn(101)[1:]
    assert int(digest(view)) == int(digest(view.clone()))


def test_zeros_of_different_lengths_differ() -> None:
    digests = [int(digest(torch.zeros(n))) for n in range(5)]
    assert all(a != b for a, b in pairwise(digests))


def test_every_tensor_is_checked_within_one_turn_of_the_sample() -> None:
    names = [f"t{i}" for i in range(30)]
    for start in range(1, 6):
        turn = range(start, start + SETTINGS.sample_stride)
        seen = [n for k in turn for n in names_to_check(names, k, SETTINGS, first=False)]
        assert set(seen) == set(names)
        assert len(seen) == len(names)


def test_every_update_checks_a_tensor_also_of_very_few() -> None:
    names = ["a", "b"]
    assert [names_to_check(names, k, SETTINGS, first=False) for k in (1, 2, 3)] == [
        ["b"],
        ["a"],
        ["b"],
    ]


def test_new_engines_and_every_nth_update_are_checked_as_a_whole() -> None:
    names = [f"t{i}" for i in range(30)]
    assert names_to_check(names, 3, SETTINGS, first=True) == names
    assert names_to_check(names, 20, SETTINGS, first=False) == names
    assert len(names_to_check(names, 3, SETTINGS, first=False)) < len(names) / 3


def test_a_head_is_whole_rows_of_a_matrix_and_all_of_a_vector():
    wide = torch.rand(4, HEAD_BYTES // 8)
    assert torch.equal(head(wide), wide[:2])
    assert torch.equal(head(wide.repeat(1, 8)), wide.repeat(1, 8)[:1])
    vector = torch.rand(HEAD_BYTES)
    assert head(vector) is vector
