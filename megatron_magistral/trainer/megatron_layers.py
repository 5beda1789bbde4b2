"""From an `Architecture` to Megatron's modules: its configuration, its layer spec, its model.

What differs from Megatron's own choices is here: norms and attention that do without Transformer
Engine, a RoPE table that covers every variant, an output layer that lets hidden states through,
and experts that are routed as those of the Hugging Face models.
"""

# ruff: noqa: E402 (Megatron is imported after the CPU compatibility hook)

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_magistral.trainer import cpu

cpu.install()

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

from megatron_magistral.trainer.attention import PackedAttention
from megatron_magistral.trainer.cpu_kernels import rms_norm
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.weights.architecture import Architecture
from megatron_magistral.weights.names import padded_vocab_size

USES_TRANSFORMER_ENGINE: bool = HAVE_TE and not cpu.is_cpu()
"""Whether layers are Transformer Engine's: its parameter names fuse norms into linear layers."""
logging.getLogger("megatron.core").setLevel(logging.WARNING)


class _RMSNorm(torch.nn.RMSNorm):
    """Megatron's wrapper of torch's norm refuses sequence parallelism, which only needs a mark:
    each rank then sees a part of the tokens, and the weight's gradients are summed."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (mypy)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return super().forward(x)
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


def transformer_config(
    arch: Architecture, layout: ParallelLayout, dtype: torch.dtype, recompute: bool
) -> TransformerConfig:
    window = next((w for w in arch.windows if w is not None), None)
    whole_layers = dict(recompute_granularity="full", recompute_method="uniform")
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        # Queries and keys both carry YaRN's factor, so their product carries its square.
        softmax_scale=arch.rope_attention_factor**2 / arch.head_dim**0.5,
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=[int(w is not None) for w in arch.windows] if window else None,
        layernorm_epsilon=arch.norm_eps,
        normalization="RMSNorm",
        qk_layernorm=arch.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        sequence_parallel=layout.splits_sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Sums over microbatches and ranks, with no division (see _finalize_grads).
        calculate_per_token_loss=True,
        variable_seq_lengths=layout.pp > 1,
        # The interleaved schedule is silently wrong with batched sends unless they overlap.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        batch_p2p_sync=not cpu.is_cpu(),
        deallocate_pipeline_outputs=not cpu.is_cpu(),
        # Weights are always loaded, so initial values would only cost time. Initialisation itself
        # must run: it marks the tensor-parallel parameters, which the gradient norm relies on.
        init_method=lambda weight: weight,
        output_layer_init_method=lambda weight: weight,
        use_cpu_initialization=cpu.is_cpu(),
        # Fused kernels of CUDA, Transformer Engine and apex, or those of cpu_kernels.py.
        bias_activation_fusion=True,
        bias_dropout_fusion=not cpu.is_cpu(),
        apply_rope_fusion=USES_TRANSFORMER_ENGINE,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=cpu.is_cpu(),
        **(whole_layers | dict(recompute_num_layers=1) if recompute else {}),
        **_expert_options(arch, layout),
    )


def _expert_options(arch: Architecture, layout: ParallelLayout) -> dict[str, Any]:
    # Where microbatches differ in length Megatron asks for this dispatcher, experts or not.
    options: dict[str, Any] = dict(moe_token_dispatcher_type="alltoall")
    if (experts := arch.experts) is None:
        return options
    return options | dict(
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_moe_experts=experts.num,
        moe_ffn_hidden_size=experts.ffn_hidden_size,
        moe_router_topk=experts.top_k,
        # A softmax over the scores of the picked experts is one over all scores, normalised.
        moe_router_pre_softmax=not experts.normalises_scores,
        moe_router_dtype="fp32",
        # No loss but the objective's: balancing experts is a matter of pretraining.
        moe_router_load_balancing_type="none",
        moe_shared_expert_intermediate_size=experts.shared_ffn_hidden_size,
        moe_shared_expert_gate=experts.shared_ffn_hidden_size is not None,
        moe_grouped_gemm=USES_TRANSFORMER_ENGINE,
    )


def _block_spec(arch: Architecture, config: TransformerConfig, vp_stage: int | None) -> Any:
    block = get_gpt_decoder_block_spec(
        config, USES_TRANSFORMER_ENGINE, normalization="RMSNorm", vp_stage=vp_stage
    )
    if USES_TRANSFORMER_ENGINE:
        return block
    block.layer_norm = _RMSNorm
    for spec in block.layer_specs:
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = _RMSNorm
        if arch.qk_norm:
            attention.q_layernorm = attention.k_layernorm = _RMSNorm
        attention.core_attention = PackedAttention
    return block


def build_chunk(
    arch: Architecture, layout: ParallelLayout, config: TransformerConfig, vp_stage: int | None
) -> GPTModel:
    stage: dict[str, Any] = dict(ignore_virtual=vp_stage is None)
    if vp_stage is not None:
        stage["vp_stage"] = vp_stage
    model = GPTModel(
        config,
        _block_spec(arch, config, vp_stage),
        padded_vocab_size(arch.vocab_size, layout.tp),
        arch.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=arch.tied_embeddings,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # Megatron counts experts that are not spread over ranks among the other parameters.
            # Always apart, their optimizer state is the same in every layout.
            setattr(parameter, "allreduce", False)  # noqa: B010 (mypy)
    # One table covers every RoPE variant; Megatron's own options cover some, with fixed constants.
    model.rotary_pos_emb.inv_freq = torch.tensor(arch.rope_inv_freq)
    if model.post_process:
        # The objective projects onto the vocabulary itself, in chunks: let hidden states through.
        model.output_layer.forward = lambda hidden, **_: (hidden, None)
    return model
