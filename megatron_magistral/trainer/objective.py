"""What a step minimises: the policy loss for reinforcement learning, cross-entropy for SFT.

An objective sees the rows of one microbatch on the last pipeline stage and returns plain sums; the
weights of the rows already hold the denominators of the whole minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_magistral.algorithm.loss import LossOutputs, mean_metrics, policy_loss
from megatron_magistral.algorithm.off_policy import gap_means, gap_sums, without_gaps
from megatron_magistral.algorithm.settings import AlgorithmSettings
from megatron_magistral.trainer.batch import NO_VERSION, PackedBatch


class Objective(Protocol):
    @property
    def temperature(self) -> float:
        """Logits are divided by it, as they were when the tokens were sampled."""

    def loss(self, logprobs_R: Tensor, entropy_R: Tensor, batch: PackedBatch) -> LossOutputs: ...

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the minibatch from the sums of `LossOutputs.metrics`."""


@dataclass(frozen=True)
class PolicyObjective:
    """The policy loss of the paper, section 2.1, with the switches of its ablations."""

    settings: AlgorithmSettings
    temperature: float = 1.0
    version: int = 0
    """Of the weights that are trained: the age of a token is counted from it."""

    def loss(self, logprobs_R: Tensor, entropy_R: Tensor, batch: PackedBatch) -> LossOutputs:
        settings = self.settings
        outputs = policy_loss(
            logprobs_R,
            batch.old_logprobs_R,
            batch.advantages_R,
            batch.weights_R,
            eps_low=settings.eps_low,
            eps_high=settings.eps_high,
            tis_cap=settings.tis_cap,
            behaviour_logprobs_T=batch.generator_logprobs_R,
            entropy_T=entropy_R,
            entropy_coef=settings.entropy_coef,
            ema_logprobs_T=batch.ema_logprobs_R,
            kl_coef=settings.kl_coef,
        )
        gaps = gap_sums(
            logprobs_R.detach(),
            batch.generator_logprobs_R,
            self.version - batch.versions_R,
            (batch.weights_R != 0) & (batch.versions_R != NO_VERSION),
        )
        return LossOutputs(outputs.loss, outputs.metrics | gaps)

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        return mean_metrics(without_gaps(sums)) | gap_means(sums)


@dataclass(frozen=True)
class SupervisedObjective:
    """Cross-entropy of the output tokens: sum over rows of -weight * logprob."""

    temperature: float = 1.0

    def loss(self, logprobs_R: Tensor, entropy_R: Tensor, batch: PackedBatch) -> LossOutputs:
        loss = -(batch.weights_R * logprobs_R).sum()
        trained_R = batch.weights_R != 0
        metrics = {
            "loss": loss.detach(),
            "num_tokens": trained_R.sum(),
            "nll": -(logprobs_R.detach() * trained_R).sum(),
            "entropy": (entropy_R.detach() * trained_R).sum(),
        }
        return LossOutputs(loss, metrics)

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        num_tokens = sums["num_tokens"]
        count = max(num_tokens, 1.0)
        per_token = {name: sums[name] / count for name in ("nll", "entropy")}
        return {"loss": sums["loss"], "num_tokens": num_tokens, **per_token}
