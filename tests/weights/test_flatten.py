"""Buckets as one run of bytes."""

from __future__ import annotations

import pytest
import torch

from megatron_magistral.weights.flatten import flatten, unflatten


def test_what_goes_in_comes_out_widest_first() -> None:
    named = [("a", torch.arange(3, dtype=torch.bfloat16)), ("b", torch.arange(4.0).view(2, 2))]
    bucket = flatten(named)
    assert [name for name, _ in unflatten(bucket)] == ["b", "a"]
    assert all(torch.equal(tensor, dict(named)[name]) for name, tensor in unflatten(bucket))


def test_tensors_behind_each_other_are_sent_from_where_they_are() -> None:
    flat = torch.arange(10.0)
    named = [("a", flat[:4].view(2, 2)), ("b", flat[4:9])]
    bucket = flatten(named, torch.float32)
    assert bucket.data.data_ptr() == flat.data_ptr() and bucket.num_bytes == 36
    assert all(torch.equal(t, dict(named)[name]) for name, t in unflatten(bucket))


@pytest.mark.parametrize(
    ("pieces", "dtype"),
    [
        ([(0, 4), (5, 9)], None),  # a gap
        ([(4, 9), (0, 4)], None),  # in another order
        ([(0, 4), (4, 9)], torch.bfloat16),  # to be converted
    ],
)
def test_anything_else_is_copied(pieces: list[tuple[int, int]], dtype: torch.dtype | None) -> None:
    flat = torch.arange(10.0)
    named = [(str(start), flat[start:stop]) for start, stop in pieces]
    bucket = flatten(named, dtype)
    assert bucket.data.data_ptr() != flat.data_ptr()
    for name, tensor in unflatten(bucket):
        assert torch.equal(tensor, dict(named)[name].to(dtype or torch.float32))


def test_tensors_of_two_storages_are_copied_though_they_may_touch() -> None:
    transposed = torch.arange(6.0).view(2, 3).t()
    bucket = flatten([("t", transposed)])
    assert torch.equal(unflatten(bucket)[0][1], transposed)


def test_an_empty_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        flatten([])
