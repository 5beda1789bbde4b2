"""The edge to Megatron-core, with `megatron_layers.py` and `megatron_checkpoint.py`.

Holds a model in a parallel layout and its optimizer, and runs Megatron's schedules over packed
microbatches. What a step does is in `step.py`, what it minimises in `objective.py`.

Gradients are plain sums over microbatches and data-parallel ranks: the weights of an objective
hold the denominators of the whole minibatch, so nothing here divides by a number of tokens.

Shapes: T packed tokens, R trained rows, H hidden size, V vocabulary entries of this rank.
"""

# ruff: noqa: E402 (Megatron is imported after the CPU compatibility hook)

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_magistral.trainer import cpu

cpu.install()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_magistral.trainer.batch import PackedBatch, pack
from megatron_magistral.trainer.layout import LayoutError, ParallelLayout
from megatron_magistral.trainer.logprobs import Head, VocabShard
from megatron_magistral.trainer.megatron_layers import build_chunk, transformer_config
from megatron_magistral.trainer.settings import OptimizerSettings
from megatron_magistral.weights.architecture import Architecture
from megatron_magistral.weights.gather import Mesh
from megatron_magistral.weights.names import name_in_model

RowFunction = Callable[[Tensor, Head, PackedBatch], Any]
"""(hidden states [R, H], head, microbatch) -> result, on the last pipeline stage."""


# --- processes --------------------------------------------------------------------------------


def init_distributed(layout: ParallelLayout, timeout_s: float, seed: int) -> Mesh:
    """Joins the ranks that torchrun or srun started, and builds the layout's groups.

    A collective that some rank does not join fails after `timeout_s`. Raises LayoutError if the
    layout is for another number of ranks.
    """
    if not cpu.is_cpu():
        torch.cuda.set_device(dist.get_node_local_rank())
    if not dist.is_initialized():
        backend = "gloo" if cpu.is_cpu() else "nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    if dist.get_world_size() != layout.world_size:
        raise LayoutError(
            f"{dist.get_world_size()} ranks were started, {layout} needs {layout.world_size}"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return Mesh(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=layout.tp,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=layout.pp,
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=layout.dp,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=layout.ep,
        ep_group=parallel_state.get_expert_model_parallel_group(),
    )


def destroy_model_parallel() -> None:
    """Leaves the layout's groups, so that another layout can be built on the same ranks.

    Megatron only forgets most of them. There are about fifty, and over gloo each has a thread that
    wakes a hundred times a second: a process that tries twenty layouts would do nothing else.
    """
    groups = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    for group in groups:
        with suppress(ValueError):  # some of them Megatron has destroyed
            if group is not None:
                dist.destroy_process_group(group)


def destroy_distributed() -> None:
    """Leaves all groups. Without it a gloo process may abort at exit."""
    destroy_model_parallel()
    dist.destroy_process_group()


# --- the model --------------------------------------------------------------------------------


class MegatronModel:
    """The model chunks of this rank. Weights are undefined until they are loaded."""

    def __init__(
        self,
        arch: Architecture,
        layout: ParallelLayout,
        mesh: Mesh,
        dtype: torch.dtype,
        recompute: bool = False,
    ) -> None:
        self.mesh = mesh
        self._arch = arch
        self._layout = layout
        self._config = transformer_config(arch, layout, dtype, recompute)
        stages: list[int | None] = [*range(layout.vpp)] if layout.vpp > 1 else [None]
        chunks = [build_chunk(arch, layout, self._config, stage) for stage in stages]
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        self.device = torch.device("cpu" if cpu.is_cpu() else torch.cuda.current_device())
        self.chunks = [
            DistributedDataParallel(self._config, ddp_config, chunk.to(self.device))
            for chunk in chunks
        ]
        no_sync = [chunk.no_sync for chunk in self.chunks]
        self._config.no_sync_func = no_sync if layout.vpp > 1 else no_sync[0]
        self._config.finalize_model_grads_func = _finalize_grads

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters, with the numbers that layers and experts have in the whole
        model in their names."""
        experts = self._arch.experts
        first_expert = self.mesh.ep_rank * experts.num // self.mesh.ep_size if experts else 0
        for chunk in self.chunks:
            layers = [layer.layer_number - 1 for layer in chunk.module.decoder.layers]
            for name, parameter in chunk.module.named_parameters():
                yield name_in_model(name, layers, first_expert), parameter

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def forward_backward(self, batches: Sequence[PackedBatch], loss: RowFunction) -> list[Any]:
        """Accumulates the gradient of sum(loss) in the parameters' `main_grad`, over microbatches
        and data-parallel ranks. `loss` returns (scalar, result); the results of all microbatches
        come back on the last stage, an empty list elsewhere."""
        return self._run(batches, loss, forward_only=False)

    @torch.no_grad()
    def forward(self, batches: Sequence[PackedBatch], function: RowFunction) -> list[Any]:
        """The results of `function` over the microbatches, on the last stage; no gradients."""
        return self._run(batches, function, forward_only=True)

    def _run(
        self, batches: Sequence[PackedBatch], function: RowFunction, forward_only: bool
    ) -> list[Any]:
        def forward_step(batches: Iterator[PackedBatch], chunk: Any) -> tuple[Tensor, Callable]:
            batch = next(batches)
            segments = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=batch.cu_seqlens,
                cu_seqlens_kv=batch.cu_seqlens,
                max_seqlen_q=batch.max_seqlen,
                max_seqlen_kv=batch.max_seqlen,
            )
            output = chunk(batch.tokens_T[None], None, None, packed_seq_params=segments)
            return output, partial(self._on_rows, chunk, batch, function)

        interleaved = len(self.chunks) > 1
        padded = self._with_empty_ones(batches)
        iterators = [iter(padded) for _ in self.chunks]
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if interleaved else iterators[0],
            model=self.chunks if interleaved else self.chunks[0],
            num_microbatches=len(padded),
            seq_length=batches[0].tokens_T.numel(),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results[: len(batches)]

    def _with_empty_ones(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """As many microbatches as the schedule needs, the last ones of padding alone."""
        num_batches = len(batches)
        if self.mesh.ep_size > 1:
            # Each layer exchanges tokens with every rank of the group, so all must come as often.
            most = torch.tensor(num_batches, device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.mesh.ep_group)
            num_batches = int(most)
        if len(self.chunks) > 1:
            # The interleaved schedule wants whole rounds of the pipeline.
            num_batches += -num_batches % self.mesh.pp_size
        empty = pack([], self._layout.token_multiple, self.device)
        return [*batches, *[empty] * (num_batches - len(batches))]

    def _on_rows(
        self,
        chunk: Any,
        batch: PackedBatch,
        function: RowFunction,
        output: Tensor,
        non_loss_data: bool = False,
    ) -> Any:
        """Megatron's loss function: `output` is [1, T, H], of this rank's tokens only where the
        sequence is split."""
        if self._config.sequence_parallel:
            hidden_TH = tensor_parallel.gather_from_sequence_parallel_region(output[0])
        else:
            hidden_TH = tensor_parallel.copy_to_tensor_model_parallel_region(output[0])
        result = function(hidden_TH[batch.rows_R], self._head(chunk), batch)
        if non_loss_data:
            return result
        loss, details = result
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), details

    def _head(self, chunk: Any) -> Head:
        model = chunk.module
        weight_VH = (
            model.shared_embedding_or_output_weight()
            if model.share_embeddings_and_output_weights
            else model.output_layer.weight
        )
        first = self.mesh.tp_rank * len(weight_VH)
        num_real = min(len(weight_VH), self._arch.vocab_size - first)
        group = self.mesh.tp_group if self.mesh.tp_size > 1 else None
        if num_real < len(weight_VH):  # the gradient of a slice is a copy of the whole
            weight_VH = weight_VH[:num_real]
        return Head(weight_VH, VocabShard(first, group))


def _finalize_grads(chunks: list[Any], num_tokens: Tensor, **kwargs: Any) -> None:
    """Reduces gradients over data-parallel ranks, over tensor-parallel ones for norms under
    sequence parallelism, and over both copies of tied embeddings; but does not divide."""
    finalize_model_grads(chunks, None, **kwargs)


# --- the optimizer ----------------------------------------------------------------------------


class MegatronOptimizer:
    """Megatron's distributed Adam: fp32 masters and moments split over data-parallel ranks."""

    def __init__(
        self, model: MegatronModel, settings: OptimizerSettings, dtype: torch.dtype
    ) -> None:
        self.inner = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.min_lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                clip_grad=settings.clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
            ),
            model.chunks,
        )
        self.scheduler = OptimizerParamScheduler(
            self.inner,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr,
            lr_warmup_steps=settings.warmup_steps,
            lr_decay_steps=max(settings.total_steps, settings.warmup_steps + 1),
            lr_decay_style=settings.schedule.value,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def grad_norm(self) -> float:
        """The norm of the whole gradient, over all ranks, before clipping."""
        self.inner.prepare_grads()
        return float(self.inner.get_grad_norm())

    def step(self) -> float:
        """Clips, updates the weights on every rank, and returns the learning rate it used."""
        self.scheduler.step(1)
        self.inner.step()
        return float(self.inner.param_groups[0]["lr"])
