"""Log-probabilities and entropy straight from hidden states, for a vocabulary split over ranks.

The logits of 32k tokens over 131k entries are 17 GB in fp32. They never exist here: the vocabulary
projection, the softmax and its gradient run in chunks of rows, the forward pass keeps two numbers
a row, and the backward pass computes each chunk of logits again. If there is but one chunk, what
the forward pass knows of it is kept: that takes no more memory than the backward pass takes anyway.

    x_j = temperature^-1 * <hidden, weight_j>        log p = x_target - lse,  lse = log sum_j e^x_j
    entropy H = lse - E_p[x]                         dH/dx_j = -p_j (x_j - E_p[x])

Chunks are for the matrix product; the softmax goes over each in blocks that fit a cache, since it
takes several passes and memory is what it waits for.

Shapes: R rows (tokens), H hidden size, V vocabulary entries of this tensor-parallel rank (padding
entries left out), C rows of one chunk, B rows of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# 64 MiB of fp32 logits a chunk: large enough for an efficient product, small beside a model.
CHUNK_ELEMENTS = 1 << 24
# 1 MiB of fp32: a block and what is computed from it stay in a core's cache. A GPU would only see
# more kernels, and takes a chunk at a time.
BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class VocabShard:
    """The vocabulary entries [first, first + V) that this rank of `group` holds. No group: all."""

    first: int = 0
    group: dist.ProcessGroup | None = None

    def reduce(self, tensor: Tensor, op: Any) -> None:
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)


@dataclass(frozen=True)
class Head:
    """The vocabulary projection of this rank, without padding entries."""

    weight_VH: Tensor
    shard: VocabShard

    def score(
        self, hidden_RH: Tensor, targets_R: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """`logprobs_and_entropy` of these rows."""
        return logprobs_and_entropy(
            hidden_RH, self.weight_VH, targets_R, temperature=temperature, shard=self.shard
        )


def logprobs_and_entropy(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    *,
    temperature: float = 1.0,
    shard: VocabShard | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """(log-probability of each target, entropy of each distribution), both fp32 [R], in nats.

    Differentiable in `hidden_RH` and `weight_VH`. With a split vocabulary every rank gets the
    same values, and the gradient of `hidden_RH` is this rank's term of a sum over ranks: the
    caller reduces it, as for any column-parallel layer.
    """
    return _LogprobsAndEntropy.apply(
        hidden_RH, weight_VH, targets_R, 1.0 / temperature, shard or VocabShard(), chunk_elements
    )


def _chunks(num_rows: int, num_columns: int, num_elements: int) -> list[slice]:
    step = max(1, num_elements // num_columns)
    return [slice(begin, begin + step) for begin in range(0, num_rows, step)]


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        targets_R: Tensor,
        scale: float,
        shard: VocabShard,
        chunk_elements: int,
    ) -> tuple[Tensor, Tensor]:
        columns_R = targets_R - shard.first
        is_here_R = (columns_R >= 0) & (columns_R < len(weight_VH))
        columns_R = columns_R.clamp(0, len(weight_VH) - 1)
        chunks = _chunks(len(hidden_RH), len(weight_VH), chunk_elements)
        keep = len(chunks) == 1 and any(ctx.needs_input_grad)
        # Per row, relative to this rank's own maximum: sum e^x, sum e^x x, x of the target.
        max_R, z_R, zx_R, target_R = hidden_RH.new_empty(
            (4, len(hidden_RH)), dtype=torch.float32
        ).unbind()
        ctx.kept_CV = None
        for rows in chunks:
            x_CV = _logits(hidden_RH[rows], weight_VH, scale)
            row_sums = (max_R[rows], z_R[rows], zx_R[rows], target_R[rows])
            _softmax_sums(x_CV, columns_R[rows], *row_sums, keep=keep)
            ctx.kept_CV = x_CV if keep else None
            del x_CV  # else it would live on beside the next one

        global_max_R = max_R.clone()
        shard.reduce(global_max_R, dist.ReduceOp.MAX)
        shift_R = max_R - global_max_R
        zx_R += z_R * shift_R
        target_R += shift_R
        sums = torch.stack([z_R * shift_R.exp(), zx_R * shift_R.exp(), target_R * is_here_R])
        shard.reduce(sums, dist.ReduceOp.SUM)
        z_R, zx_R, target_R = sums
        log_z_R, mean_R = z_R.log(), zx_R / z_R  # relative to the global maximum

        ctx.save_for_backward(
            *(hidden_RH, weight_VH, columns_R, is_here_R),
            *(max_R, global_max_R + log_z_R, global_max_R + mean_R),
        )
        ctx.scale, ctx.chunk_elements = scale, chunk_elements
        ctx.set_materialize_grads(False)  # None: that output is not part of the loss
        return target_R - log_z_R, log_z_R - mean_R

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logprobs_R: Tensor | None, grad_entropy_R: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, columns_R, is_here_R, max_R, lse_R, mean_R = ctx.saved_tensors
        # Used up here: a second backward pass computes them again.
        kept_CV, ctx.kept_CV = ctx.kept_CV, None
        if kept_CV is not None:  # relative to this rank's maximum
            lse_R, mean_R = lse_R - max_R, mean_R - max_R
        if grad_logprobs_R is None:
            grad_logprobs_R = torch.zeros_like(lse_R)
        # Those of the logits before scaling: on rows the product costs nothing.
        grad_logprobs_R = grad_logprobs_R * ctx.scale
        grad_entropy_R = None if grad_entropy_R is None else grad_entropy_R * ctx.scale
        at_target_R = grad_logprobs_R * is_here_R
        grad_hidden_RH = torch.empty_like(hidden_RH)
        # Chunks add up in fp32 whatever the model's precision.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for rows in _chunks(len(hidden_RH), len(weight_VH), ctx.chunk_elements):
            values = (lse_R[rows], mean_R[rows], grad_logprobs_R[rows])
            grad_entropy_C = None if grad_entropy_R is None else grad_entropy_R[rows]
            if kept_CV is not None:
                grad_CV = _grad_of_exponentials_(kept_CV, *values, grad_entropy_C)
            else:
                grad_CV = _grad_of_logits_(
                    _logits(hidden_RH[rows], weight_VH, ctx.scale), *values, grad_entropy_C
                )
            grad_CV.scatter_add_(-1, columns_R[rows, None], at_target_R[rows, None])
            grad_CV = grad_CV.to(weight_VH.dtype)
            torch.mm(grad_CV, weight_VH, out=grad_hidden_RH[rows])
            if weight_VH.dtype == torch.float32:
                grad_weight_VH.addmm_(grad_CV.T, hidden_RH[rows])
            else:
                grad_weight_VH += grad_CV.T @ hidden_RH[rows]
            del grad_CV
        return grad_hidden_RH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None


def _logits(hidden_CH: Tensor, weight_VH: Tensor, scale: float) -> Tensor:
    """In the model's precision, as the generator computes them, then fp32."""
    x_CV = (hidden_CH @ weight_VH.T).float()
    return x_CV if scale == 1.0 else x_CV.mul_(scale)


def _blocks(x_CV: Tensor) -> list[slice]:
    num_rows, num_columns = x_CV.shape
    is_cpu = x_CV.device.type == "cpu"
    return _chunks(num_rows, num_columns, BLOCK_ELEMENTS if is_cpu else x_CV.numel())


def _softmax_sums(
    x_CV: Tensor,
    columns_C: Tensor,
    max_C: Tensor,
    z_C: Tensor,
    zx_C: Tensor,
    target_C: Tensor,
    *,
    keep: bool,
) -> None:
    """Fills the last four. `x_CV` is used up; with `keep` it holds e^(x - max) afterwards."""
    for rows in _blocks(x_CV):
        x_BV = x_CV[rows]
        torch.amax(x_BV, dim=-1, out=max_C[rows])
        x_BV -= max_C[rows, None]
        target_C[rows] = x_BV.gather(-1, columns_C[rows, None])[:, 0]
        e_BV = x_BV.exp()
        torch.sum(e_BV, dim=-1, out=z_C[rows])
        zx_C[rows] = torch.linalg.vecdot(e_BV, x_BV)
        if keep:
            x_BV.copy_(e_BV)


def _grad_of_logits_(
    x_CV: Tensor, lse_C: Tensor, mean_C: Tensor, grad_C: Tensor, grad_entropy_C: Tensor | None
) -> Tensor:
    """-p (grad + grad_entropy (x - mean)): all but the target's own term, in place of `x_CV`."""
    for rows in _blocks(x_CV):
        x_BV = x_CV[rows]
        if grad_entropy_C is None:
            x_BV.sub_(lse_C[rows, None]).exp_().mul_(-grad_C[rows, None])
        else:
            p_BV = (x_BV - lse_C[rows, None]).exp_()
            x_BV.sub_(mean_C[rows, None]).mul_(grad_entropy_C[rows, None]).add_(grad_C[rows, None])
            x_BV.mul_(p_BV).neg_()
    return x_CV


def _grad_of_exponentials_(
    e_CV: Tensor, lse_C: Tensor, mean_C: Tensor, grad_C: Tensor, grad_entropy_C: Tensor | None
) -> Tensor:
    """The same from what `_softmax_sums` kept, with `lse_C` and `mean_C` relative to the maximum:
    where only log-probabilities are trained, one product."""
    if grad_entropy_C is None:
        return e_CV.mul_((-grad_C * (-lse_C).exp())[:, None])
    # Where e underflowed p is zero, whatever finite number the logarithm gives.
    x_CV = e_CV.clamp_min_(torch.finfo(e_CV.dtype).tiny).log_()
    return _grad_of_logits_(x_CV, lse_C, mean_C, grad_C, grad_entropy_C)
