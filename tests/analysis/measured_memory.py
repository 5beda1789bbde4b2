"""What a rank of a real trainer holds, and what its backward pass waits for, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_magistral.algorithm.settings import AlgorithmSettings
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.megatron import destroy_model_parallel
from megatron_magistral.trainer.objective import PolicyObjective
from megatron_magistral.trainer.settings import OptimizerSettings
from megatron_magistral.trainer.step import Trainer
from tests.trainer.models import random_sequences

NUM_TOKENS = 512
SEQUENCES = [(4, 252), (6, 250)]


@dataclass(frozen=True)
class Case:
    model: Path
    layout: ParallelLayout
    dtype: torch.dtype = torch.float32
    recompute: bool = False


@dataclass(frozen=True)
class Measured:
    weights: int
    gradients: int
    optimizer: int
    activations: int


def measure(cases: list[Case]) -> list[Measured]:
    """On every rank, one case after the other."""
    return [_measure(case) for case in cases]


def _measure(case: Case) -> Measured:
    trainer = Trainer.create(
        case.model,
        case.layout,
        OptimizerSettings(lr=1e-3),
        dtype=case.dtype,
        recompute=case.recompute,
    )
    sequences = random_sequences(SEQUENCES, vocab_size=trainer.arch.vocab_size)
    batches = trainer.pack(sequences, NUM_TOKENS)
    assert len(batches) == 1
    trainer.train_minibatch(batches, PolicyObjective(AlgorithmSettings()))  # makes the moments
    activations = _kept_for_backward(trainer, batches)
    parameters = [parameter for _, parameter in trainer.model.named_parameters()]
    measured = Measured(
        weights=sum(map(_bytes, parameters)),
        gradients=sum(_bytes(parameter.main_grad) for parameter in parameters),
        optimizer=_optimizer_bytes(trainer, parameters),
        activations=activations,
    )
    destroy_model_parallel()
    return measured


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _optimizer_bytes(trainer: Trainer, parameters: list[Any]) -> int:
    """Masters and moments; masters of an fp32 model are the weights themselves."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    chained: Any = trainer.optimizer.inner
    total = 0
    for optimizer in getattr(chained, "chained_optimizers", [chained]):
        inner = optimizer.optimizer
        for group in inner.param_groups:
            for master in group["params"]:
                if master.untyped_storage().data_ptr() not in weights:
                    total += _bytes(master)
                moments = (inner.state[master][name] for name in ("exp_avg", "exp_avg_sq"))
                total += sum(map(_bytes, moments))
    return total


def _kept_for_backward(trainer: Trainer, batches: Any) -> int:
    """Bytes of everything that autograd saved by the end of the last forward pass: each storage
    once, without the weights and without what the rows of the loss need."""
    seen: dict[int, Tensor] = {}
    weights = {p.untyped_storage().data_ptr() for _, p in trainer.model.named_parameters()}
    is_forward = True

    def pack(tensor: Tensor) -> Tensor:
        if is_forward:
            seen.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    def loss(hidden_RH: Tensor, head: Any, batch: Any) -> tuple[Tensor, Any]:
        nonlocal is_forward
        is_forward = False
        scores = head.score(hidden_RH, batch.targets_R, 1.0)
        outputs = PolicyObjective(AlgorithmSettings()).loss(*scores, batch)
        return outputs.loss, outputs.metrics

    unpack: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        trainer.model.forward_backward(batches, loss)
    return sum(
        tensor.untyped_storage().nbytes()
        for pointer, tensor in seen.items()
        if pointer not in weights
    )
