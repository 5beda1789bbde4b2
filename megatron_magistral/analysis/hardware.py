"""GPUs by name, and the shares of their peaks that are reckoned with. Pure.

Peaks are from the data sheets, memory is what the driver reports. The shares are assumptions, each
an option of `magistral plan`: measure yours.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """`tflop_s` is dense bf16."""

    name: str
    memory_gib: float
    tflop_s: float
    hbm_gb_s: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", memory_gib=80.0, tflop_s=312.0, hbm_gb_s=2039.0),
        Gpu("h100", memory_gib=79.6, tflop_s=989.0, hbm_gb_s=3350.0),
        Gpu("h200", memory_gib=140.4, tflop_s=989.0, hbm_gb_s=4800.0),
    )
}


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Not measured here; seconds unless said."""

    train_mfu: float = 0.4
    """Of the peak, forward and backward of packed sequences, padding and imbalance included."""
    prefill_mfu: float = 0.5
    decode_mfu: float = 0.6
    decode_bandwidth: float = 0.7
    """Of the memory's, while a generator decodes."""
    decode_step_s: float = 3e-3
    """Of scheduling and sampling, for each token; the overlap scheduler is off."""
    all_reduce_s: float = 15e-6
    """Of a small message within a node; two a layer where a generator has several GPUs."""
    trainer_reserve_gib: float = 8.0
    """CUDA, NCCL, workspaces of kernels, fragmentation."""
    generator_share: float = 0.85
    """Of a generator's memory for weights and cache; the rest is for activations and graphs."""
    verify_s: float = 0.5
    """A completion's grading, mean of maths (milliseconds) and code (seconds)."""
    beside_update_s: float = 1.0
    """What a step costs the trainer beside training and sending: hand-over, probe, checkpoints."""

    @property
    def trainer_reserve_bytes(self) -> float:
        return self.trainer_reserve_gib * GIB
