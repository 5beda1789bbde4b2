"""What lies between the matrix products of a layer, as the CPU likes it: few passes over memory.

On CUDA Transformer Engine and apex fuse these operations. Megatron without them, and autograd over
plain operations, write every intermediate result to memory and read it again, which on a CPU takes
a good part of a training step. `cpu.py` puts these functions in their places.

Shapes: N tokens (any leading dimensions), H hidden size, F feed-forward size, T packed tokens,
A heads, D head size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32, in the dtype of `x_NH`."""
    return _RMSNorm.apply(x_NH, weight_H, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_NH: Tensor, weight_H: Tensor, eps: float
    ) -> Tensor:
        x32_NH = x_NH.float()
        inverse_N1 = torch.linalg.vecdot(x32_NH, x32_NH)[..., None]
        inverse_N1.div_(x_NH.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_NH, weight_H, inverse_N1)
        return (x32_NH * inverse_N1).mul_(weight_H).to(x_NH.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """With n = x * inverse: dx = inverse * (g * w - n * mean(g * w * n)), dw = sum(g * n)."""
        x_NH, weight_H, inverse_N1 = ctx.saved_tensors
        weight32_H, grad32_NH = weight_H.float(), grad_NH.float()
        normed_NH = x_NH * inverse_N1
        product_NH = grad32_NH * normed_NH
        mean_N1 = (product_NH @ weight32_H)[..., None].div_(-x_NH.shape[-1])
        grad_weight_H = product_NH.flatten(0, -2).sum(dim=0)
        grad_x_NH = torch.mul(grad32_NH, weight32_H, out=product_NH)
        grad_x_NH.addcmul_(normed_NH, mean_N1).mul_(inverse_N1)
        return grad_x_NH.to(x_NH.dtype), grad_weight_H.to(weight_H.dtype), None


def swiglu(x_N2F: Tensor) -> Tensor:
    """silu(first half) * second half: [..., 2 F] -> [..., F]."""
    return _SwiGLU.apply(x_N2F)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N2F: Tensor) -> Tensor:  # type: ignore[override]
        gate_NF, up_NF = x_N2F.chunk(2, dim=-1)
        silu_NF = torch.nn.functional.silu(gate_NF)
        ctx.save_for_backward(x_N2F, silu_NF)
        return silu_NF * up_NF

    @staticmethod
    def backward(ctx: Any, grad_NF: Tensor) -> Tensor:  # type: ignore[override]
        x_N2F, silu_NF = ctx.saved_tensors
        gate_NF, up_NF = x_N2F.chunk(2, dim=-1)
        # Both halves go where they belong: autograd would concatenate them.
        grad_N2F = torch.empty_like(x_N2F)
        grad_gate_NF, grad_up_NF = grad_N2F.chunk(2, dim=-1)
        torch.mul(grad_NF, up_NF, out=grad_gate_NF)
        torch.ops.aten.silu_backward(grad_gate_NF, gate_NF, grad_input=grad_gate_NF)
        torch.mul(grad_NF, silu_NF, out=grad_up_NF)
        return grad_N2F


class PackedRotary:
    """Rotary embeddings of packed sequences, whose positions restart at every segment.

    Megatron takes cosines and sines anew for queries and keys of every layer; here they are kept
    from one call to the next as long as the microbatch is the same.
    """

    def __init__(self) -> None:
        self._of: tuple[Tensor, Tensor, float] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def __call__(self, x_TAD: Tensor, angles: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        """`angles` [longest segment, 1, 1, D] of the positions of one sequence, both halves of D
        the same; cosines and sines are multiplied by `scale`."""
        of = (angles, cu_seqlens, scale)
        if self._tables is None or self._of is None or not _are_same(self._of, of):
            self._of, self._tables = of, _rotation_tables(*of)
        cos_T1D, signed_sin_T1D = (table.to(x_TAD.dtype) for table in self._tables)
        return _Rotate.apply(x_TAD, cos_T1D, signed_sin_T1D)


def _are_same(one: tuple[Tensor, Tensor, float], two: tuple[Tensor, Tensor, float]) -> bool:
    """The very same tensors: whether others hold the same numbers is not worth a look."""
    return one[0] is two[0] and one[1] is two[1] and one[2] == two[2]


def _rotation_tables(angles: Tensor, cu_seqlens: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines, and sines that are negative in the first half of D, both [T, 1, D]."""
    lengths = [end - begin for begin, end in pairwise(cu_seqlens.tolist())]
    angles_T1D = torch.cat([angles[:length, 0] for length in lengths])
    signed_sin_T1D = angles_T1D.sin() * scale
    signed_sin_T1D.chunk(2, dim=-1)[0].neg_()
    return angles_T1D.cos() * scale, signed_sin_T1D


class _Rotate(torch.autograd.Function):
    """Turns each pair (first half, second half) by its angle; the gradient is turned back."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x_TAD: Tensor, cos_T1D: Tensor, signed_sin_T1D: Tensor
    ) -> Tensor:
        ctx.save_for_backward(cos_T1D, signed_sin_T1D)
        return _rotate(x_TAD, cos_T1D, signed_sin_T1D, direction=1.0)

    @staticmethod
    def backward(ctx: Any, grad_TAD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos_T1D, signed_sin_T1D = ctx.saved_tensors
        return _rotate(grad_TAD, cos_T1D, signed_sin_T1D, direction=-1.0), None, None


def _rotate(x_TAD: Tensor, cos_T1D: Tensor, signed_sin_T1D: Tensor, direction: float) -> Tensor:
    """(first, second) -> (first cos - second sin, second cos + first sin)."""
    first, second = x_TAD.chunk(2, dim=-1)
    swapped_TAD = torch.cat((second, first), dim=-1)
    return (x_TAD * cos_T1D).addcmul_(swapped_TAD, signed_sin_T1D, value=direction)


def add_weight_grad(input_NH: Tensor, grad_NF: Tensor, main_grad_FH: Tensor) -> None:
    """main_grad += grad^T input, of a linear layer, without a gradient tensor in between."""
    if main_grad_FH.dtype == input_NH.dtype:
        main_grad_FH.addmm_(grad_NF.T, input_NH)
    else:
        main_grad_FH += grad_NF.T @ input_NH
