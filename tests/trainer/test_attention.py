"""Attention per segment against one softmax over a mask."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_magistral.trainer.attention import PackedAttention, segment_attention

HEADS, KV_HEADS, SIZE = 4, 2, 8


def _plain(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=0) for t in (k, v))
    positions = torch.arange(q.shape[1])
    distance = positions[:, None] - positions
    hidden = (distance < 0) | (distance >= (window or len(positions)))
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ v


def _qkv(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [
        torch.randn(heads, length, SIZE, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


@pytest.mark.parametrize("length", [1, 4, 5, 9, 23])
@pytest.mark.parametrize("window", [None, 1, 4, 5, 50])
def test_a_window_lets_each_token_see_itself_and_those_before_it(
    length: int, window: int | None
) -> None:
    q, k, v = _qkv(length)
    got = segment_attention(q, k, v, window, 0.3)
    torch.testing.assert_close(got, _plain(q, k, v, window, 0.3))


def _config(window_size: tuple[int, int] | None, marks: list[int] | None) -> SimpleNamespace:
    return SimpleNamespace(window_size=window_size, window_attn_skip_freq=marks)


def test_segments_do_not_see_each_other() -> None:
    lengths = [5, 1, 9, 3]
    parts = [_qkv(length) for length in lengths]
    attention = PackedAttention(_config((3, 0), None), layer_number=1, softmax_scale=0.3)
    packed = [torch.cat(tensors, dim=1).transpose(0, 1) for tensors in zip(*parts, strict=True)]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    got = attention(*packed, None, packed_seq_params=SimpleNamespace(cu_seqlens_q=bounds))
    want = torch.cat([_plain(q, k, v, 4, 0.3) for q, k, v in parts], dim=1)
    torch.testing.assert_close(got, want.transpose(0, 1).flatten(1))


@pytest.mark.parametrize(("layer_number", "is_windowed"), [(1, False), (2, True)])
def test_only_marked_layers_have_a_window(layer_number: int, is_windowed: bool) -> None:
    attention = PackedAttention(_config((3, 0), [0, 1]), layer_number, softmax_scale=0.3)
    q, k, v = (t.transpose(0, 1) for t in _qkv(9))
    params = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 9]))
    got = attention(q, k, v, None, packed_seq_params=params)
    want = _plain(*_qkv(9), 4 if is_windowed else None, 0.3)
    torch.testing.assert_close(got, want.transpose(0, 1).flatten(1))
