"""Log-probabilities and entropy straight from hidden states, for a vocabulary split over ranks.

The logits of 32k tokens over 131k entries are 17 GB in fp32. They never exist here: the vocabulary
projection, the softmax and its gradient run in chunks of rows, the forward pass keeps two numbers
a row, and the backward pass computes each chunk of logits again. Logits that are one chunk are
kept: they take no more memory than the backward pass takes anyway.

    x_j = temperature^-1 * <hidden, weight_j>        log p = x_target - lse,  lse = log sum_j e^x_j
    entropy H = lse - E_p[x]                         dH/dx_j = -p_j (x_j - E_p[x])

Shapes: R rows (tokens), H hidden size, V vocabulary entries of this tensor-parallel rank (padding
entries left out), C rows of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# 64 MiB of fp32 logits a chunk: large enough for an efficient product, small beside a model.
CHUNK_ELEMENTS = 1 << 24


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


def _chunks(num_rows: int, num_columns: int, chunk_elements: int) -> list[slice]:
    step = max(1, chunk_elements // num_columns)
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
        # Per row, relative to this rank's own maximum: sum e^x, sum e^x x, x of the target.
        max_R, z_R, zx_R, target_R = hidden_RH.new_empty(
            (4, len(hidden_RH)), dtype=torch.float32
        ).unbind()
        columns_R = targets_R - shard.first
        is_here_R = (columns_R >= 0) & (columns_R < len(weight_VH))
        columns_R = columns_R.clamp(0, len(weight_VH) - 1)
        ctx.kept_CV = None
        chunks = _chunks(len(hidden_RH), len(weight_VH), chunk_elements)
        for rows in chunks:
            x_CV = _logits(hidden_RH[rows], weight_VH, scale)
            torch.amax(x_CV, dim=-1, out=max_R[rows])
            x_CV -= max_R[rows, None]
            target_R[rows] = x_CV.gather(-1, columns_R[rows, None])[:, 0]
            e_CV = x_CV.exp()
            torch.sum(e_CV, dim=-1, out=z_R[rows])
            zx_R[rows] = torch.linalg.vecdot(e_CV, x_CV)
            if len(chunks) == 1 and any(ctx.needs_input_grad):
                ctx.kept_CV = x_CV

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
        at_target_R = grad_logprobs_R * is_here_R
        grad_hidden_RH = torch.empty_like(hidden_RH)
        # Chunks add up in fp32 whatever the model's precision.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for rows in _chunks(len(hidden_RH), len(weight_VH), ctx.chunk_elements):
            x_CV = kept_CV
            if x_CV is None:
                x_CV = _logits(hidden_RH[rows], weight_VH, ctx.scale)
            grad_entropy_C = None if grad_entropy_R is None else grad_entropy_R[rows]
            grad_CV = _grad_of_softmax(
                x_CV, lse_R[rows], mean_R[rows], grad_logprobs_R[rows], grad_entropy_C
            )
            grad_CV.scatter_add_(-1, columns_R[rows, None], at_target_R[rows, None])
            grad_CV = grad_CV.mul_(ctx.scale).to(weight_VH.dtype)
            torch.mm(grad_CV, weight_VH, out=grad_hidden_RH[rows])
            if weight_VH.dtype == torch.float32:
                grad_weight_VH.addmm_(grad_CV.T, hidden_RH[rows])
            else:
                grad_weight_VH += grad_CV.T @ hidden_RH[rows]
        return grad_hidden_RH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None


def _grad_of_softmax(
    x_CV: Tensor,
    lse_C: Tensor,
    mean_C: Tensor,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """-p (grad_logprobs + grad_entropy (x - mean)): all but the target's own term. Takes the
    memory of `x_CV`; with no entropy in the loss it needs no second chunk."""
    if grad_entropy_C is None:
        return x_CV.sub_(lse_C[:, None]).exp_().mul_(-grad_logprobs_C[:, None])
    p_CV = (x_CV - lse_C[:, None]).exp_()
    x_CV.sub_(mean_C[:, None]).mul_(grad_entropy_C[:, None]).add_(grad_logprobs_C[:, None])
    return x_CV.mul_(p_CV).neg_()


def _logits(hidden_CH: Tensor, weight_VH: Tensor, scale: float) -> Tensor:
    """In the model's precision, as the generator computes them, then fp32."""
    x_CV = (hidden_CH @ weight_VH.T).float()
    return x_CV if scale == 1.0 else x_CV.mul_(scale)
