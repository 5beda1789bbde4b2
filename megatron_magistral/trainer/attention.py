"""Attention over packed sequences without Transformer Engine: one SDPA call per segment.

Megatron's own DotProductAttention refuses packed sequences, and one call with a block-diagonal
mask computes the T x T scores of tokens that never see each other. Per segment nothing is wasted.

Shapes: T packed tokens, S tokens of one segment, A query heads, K kv heads (A a multiple of K),
D head size, W window.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedAttention(torch.nn.Module):
    """Megatron's `core_attention` for packed (THD) input: causal, grouped-query, with Mistral's
    sliding window on the layers that `config.window_attn_skip_freq` marks (all if it is None)."""

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        self._scale = softmax_scale
        marks = config.window_attn_skip_freq
        windowed = config.window_size is not None and (marks is None or marks[layer_number - 1])
        # Megatron counts the tokens to the left, Hugging Face the token itself as well.
        self._window = config.window_size[0] + 1 if windowed else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *_: Any,
        packed_seq_params: Any,
        **__: Any,
    ) -> Tensor:
        """query [T, A, D], key and value [T, K, D] -> [T, A * D]."""
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [end - begin for begin, end in pairwise(bounds)]
        parts = [t.transpose(0, 1).split(lengths, dim=1) for t in (query, key, value)]
        outputs = [
            segment_attention(q, k, v, self._window, self._scale)
            for q, k, v in zip(*parts, strict=True)
        ]
        return torch.cat([output.transpose(0, 1) for output in outputs]).flatten(1)


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None
) -> Tensor:
    """Causal attention of one sequence: query [A, S, D], key and value [K, S, D] -> [A, S, D].

    With a window of W each token sees itself and the W - 1 before it. Queries go in blocks of W,
    each against the at most 2 W - 1 keys it can see, so that memory grows with S * W, not S * S.
    """
    length = query.shape[1]
    if window is None or length <= window:
        return _sdpa(query, key, value, None, scale)
    blocks = []
    for begin in range(0, length, window):
        end, first = min(begin + window, length), max(0, begin - window + 1)
        positions = torch.arange(first, end, device=query.device)
        distance = positions[begin - first :, None] - positions  # [queries, keys]
        visible = (distance >= 0) & (distance < window)
        keys, values = key[:, first:end], value[:, first:end]
        blocks.append(_sdpa(query[:, begin:end], keys, values, visible, scale))
    return torch.cat(blocks, dim=1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float | None) -> Tensor:
    q, k, v = q[None], k[None], v[None]  # the CPU's fused kernel wants a batch dimension
    is_causal = visible is None
    return F.scaled_dot_product_attention(
        q, k, v, visible, is_causal=is_causal, scale=scale, enable_gqa=True
    )[0]
