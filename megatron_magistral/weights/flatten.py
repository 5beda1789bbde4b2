"""Flattened buckets: many tensors as one run of bytes, the layout SGLang calls "flattened_bucket".

    B  bytes of a bucket

The bytes of each tensor follow those of the one before, without padding. The receiver views its
slice as the tensor's dtype, so every offset must be a multiple of the element size: wider dtypes
come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_magistral.rollout.engine import TensorSpec
from megatron_magistral.weights.buffers import as_one


@dataclass(frozen=True)
class FlatBucket:
    """`data` [B] uint8 holds the tensors of `specs` in this order."""

    specs: tuple[TensorSpec, ...]
    data: Tensor

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Views of the tensors."""
        return unflatten(self)


@dataclass(frozen=True)
class LooseBucket:
    """`named` are contiguous tensors of `specs`, in this order, wherever they are."""

    specs: tuple[TensorSpec, ...]
    named: tuple[tuple[str, Tensor], ...]

    def tensors(self) -> list[tuple[str, Tensor]]:
        return list(self.named)


def flatten(named: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> FlatBucket:
    """`named` in one contiguous buffer on their device, converted to `dtype` if given.

    Tensors that lie behind each other already are not copied: the bucket is a view of them.

    Raises:
        ValueError: nothing to flatten.
    """
    if not named:
        raise ValueError("cannot flatten an empty bucket")
    is_converted = any(tensor.dtype != (dtype or tensor.dtype) for _, tensor in named)
    if not is_converted and (data := as_one([tensor for _, tensor in named])) is not None:
        return FlatBucket(
            tuple(_spec(name, tensor.shape, tensor.dtype) for name, tensor in named), data
        )
    ordered = sorted(named, key=lambda item: -(dtype or item[1].dtype).itemsize)
    dtypes = [dtype or tensor.dtype for _, tensor in ordered]
    sizes = [t.numel() * d.itemsize for (_, t), d in zip(ordered, dtypes, strict=True)]
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=ordered[0][1].device)  # [B]
    for (_, tensor), target, wire_dtype in zip(ordered, data.split(sizes), dtypes, strict=True):
        target.view(wire_dtype).view(tensor.shape).copy_(tensor)
    specs = tuple(
        _spec(name, tensor.shape, wire_dtype)
        for (name, tensor), wire_dtype in zip(ordered, dtypes, strict=True)
    )
    return FlatBucket(specs, data)


def loosen(named: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> LooseBucket:
    """`named`, converted to `dtype` if given; what is of it and contiguous is not copied."""
    made = [(name, tensor.detach().to(dtype or tensor.dtype)) for name, tensor in named]
    return LooseBucket(
        specs=tuple(_spec(name, tensor.shape, tensor.dtype) for name, tensor in made),
        named=tuple((name, tensor.contiguous()) for name, tensor in made),
    )


def _spec(name: str, shape: Sequence[int], dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(name, tuple(shape), str(dtype).removeprefix("torch."))


def unflatten(bucket: FlatBucket) -> list[tuple[str, Tensor]]:
    """Views of the tensors in a bucket: what the receiver does."""
    dtypes = [getattr(torch, spec.dtype) for spec in bucket.specs]
    sizes = [
        torch.Size(spec.shape).numel() * dtype.itemsize
        for spec, dtype in zip(bucket.specs, dtypes, strict=True)
    ]
    return [
        (spec.name, data.view(dtype).view(spec.shape))
        for spec, dtype, data in zip(bucket.specs, dtypes, bucket.data.split(sizes), strict=True)
    ]
