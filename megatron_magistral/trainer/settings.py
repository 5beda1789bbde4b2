"""How the optimizer is set up. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Schedule(StrEnum):
    """Learning rate after the linear warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with fp32 master weights. Norms and biases are not decayed.

    Step k of the warm-up (from 1) runs at lr * k / warmup_steps; a cosine then ends at `min_lr` in
    step `total_steps`, which has no effect on a constant rate. `clip_grad` bounds the norm of the
    whole gradient.
    """

    lr: float
    min_lr: float = 0.0
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0
    total_steps: int = 1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
