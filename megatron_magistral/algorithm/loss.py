"""The policy loss (arXiv 2506.10910, section 2.1).

How it differs from GRPO:

1. No KL term and no reference model. A KL term to an exponential moving average of the weights
   exists for the ablation of section 7.4.2 and is off by default.
2. The loss of a group is divided by the number of tokens of the whole group, not each completion
   by its own length, so that a long wrong answer is not cheaper per token than a short one.
3. Advantages are centred per group and normalised over the minibatch, not by the group's own
   standard deviation, which overweights very easy and very hard problems.
4. Clip-higher: the ratio may rise to 1 + eps_high and fall to 1 - eps_low with
   eps_high > eps_low, so that unlikely tokens can gain probability and entropy survives.
5. Groups whose rewards are all equal carry no gradient and are dropped before they get here.

2 and 3 live in `advantage.py`, which hands over one weight and one advantage per completion;
5 is decided by the queue with `advantage.diversity`. This file holds 1 and 4. The ratio is taken
per token against the log-probability recorded when that token was sampled, so one completion may
span several policy versions.

Shapes: T tokens of one packed microbatch, prompts and padding included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# exp(20) = 5e8: far outside every trust region, and its square still fits float32.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossOutputs:
    """Everything here is a plain sum over tokens: add it up over microbatches and ranks."""

    loss: Tensor
    """() with gradient; the denominator is already inside the weights, divide by nothing."""
    metrics: dict[str, Tensor]
    """() each, detached; `mean_metrics` turns the reduced sums into means."""


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    tis_cap: float | None = None,
    behaviour_logprobs_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    entropy_coef: float = 0.0,
    ema_logprobs_T: Tensor | None = None,
    kl_coef: float = 0.0,
) -> LossOutputs:
    """Sum over tokens of -w * c * min(rho * A, clip(rho, 1 - eps_low, 1 + eps_high) * A).

    rho = exp(logprobs - old_logprobs). `weights_T` is `TrainSequence.weight` on output tokens and 0
    on every other token, whose remaining inputs are then ignored, whatever they hold.

    `old_logprobs_T` are the generator's, or the trainer's own when they are recomputed; then
    `behaviour_logprobs_T` are the generator's, and with `tis_cap` each token is corrected by the
    constant c = min(exp(old - behaviour), tis_cap) (otherwise c = 1). `entropy_T` in nats is
    reported, and rewarded if `entropy_coef` > 0. `kl_coef` > 0 adds KL(policy || moving average),
    by the estimator exp(d) - d - 1 with d = ema_logprobs - logprobs.

    Raises ValueError if a switch is on whose tensor is missing.
    """
    _require_tensor("tis_cap", tis_cap, "behaviour_logprobs_T", behaviour_logprobs_T)
    _require_tensor("entropy_coef", entropy_coef, "entropy_T", entropy_T)
    _require_tensor("kl_coef", kl_coef, "ema_logprobs_T", ema_logprobs_T)

    trained_T = weights_T != 0
    ratio_T = _ratio(logprobs_T - old_logprobs_T.detach(), trained_T)
    clipped_T = ratio_T.clamp(1 - eps_low, 1 + eps_high)
    objective_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)

    if behaviour_logprobs_T is None:  # then the old ones are the generator's own
        behaviour_logprobs_T = old_logprobs_T
    if tis_cap is not None:
        drift_T = old_logprobs_T - behaviour_logprobs_T
        objective_T = objective_T * _truncated_importance(drift_T, trained_T, tis_cap)

    with torch.no_grad():
        metrics = _ratio_metrics(ratio_T, advantages_T, trained_T, eps_low, eps_high)
        metrics |= _generator_metrics(logprobs_T, behaviour_logprobs_T, trained_T)
    if entropy_T is not None:
        entropy_T = _masked(entropy_T, trained_T)
        metrics["entropy"] = entropy_T.detach().sum()
        if entropy_coef != 0:
            objective_T = objective_T + entropy_coef * entropy_T
    if ema_logprobs_T is not None:
        kl_T = _kl(ema_logprobs_T.detach() - logprobs_T, trained_T)
        metrics["kl_ema"] = kl_T.detach().sum()
        if kl_coef != 0:
            objective_T = objective_T - kl_coef * kl_T

    loss = -(weights_T * _masked(objective_T, trained_T)).sum()
    return LossOutputs(loss, metrics | {"loss": loss.detach()})


def mean_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Per-token means of metrics that were summed over all microbatches and ranks of a minibatch.

    `loss` stays as it is. `effective_sample_size` is (sum w)^2 / (n * sum w^2) of the importance
    weights w = trainer / generator: 1 on-policy, near 1 / n when one token dominates.
    """
    num_tokens = sums["num_tokens"]
    means = {"loss": sums["loss"], "num_tokens": num_tokens}
    if num_tokens == 0:
        return means
    plain = sums.keys() - {"loss", "num_tokens", "generator_weight", "generator_weight_squared"}
    means |= {name: sums[name] / num_tokens for name in sorted(plain)}
    squared = num_tokens * sums["generator_weight_squared"]
    means["effective_sample_size"] = sums["generator_weight"] ** 2 / squared
    return means


def _ratio_metrics(
    ratio_T: Tensor, advantages_T: Tensor, trained_T: Tensor, eps_low: float, eps_high: float
) -> dict[str, Tensor]:
    """A token is clipped where the minimum takes the constant branch and so has no gradient."""
    clipped_low_T = trained_T & (advantages_T < 0) & (ratio_T < 1 - eps_low)
    clipped_high_T = trained_T & (advantages_T > 0) & (ratio_T > 1 + eps_high)
    return {
        "num_tokens": trained_T.sum(),
        "clip_fraction_low": clipped_low_T.sum(),
        "clip_fraction_high": clipped_high_T.sum(),
        "ratio": (ratio_T * trained_T).sum(),
    }


def _generator_metrics(
    logprobs_T: Tensor, behaviour_logprobs_T: Tensor, trained_T: Tensor
) -> dict[str, Tensor]:
    """How far the trainer's policy is from what the generator sampled with."""
    log_ratio_T = _masked(logprobs_T - behaviour_logprobs_T, trained_T)
    weight_T = _ratio(log_ratio_T, trained_T) * trained_T
    return {
        "generator_log_ratio_abs": log_ratio_T.abs().sum(),
        "generator_weight": weight_T.sum(),
        "generator_weight_squared": weight_T.square().sum(),
        "kl_generator": _kl(log_ratio_T, trained_T).sum(),  # KL(generator || trainer)
    }


def _ratio(log_ratio_T: Tensor, trained_T: Tensor) -> Tensor:
    return _masked(log_ratio_T, trained_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _truncated_importance(log_ratio_T: Tensor, trained_T: Tensor, cap: float) -> Tensor:
    """min(trainer / generator, cap): bounds the variance of the correction at a known bias."""
    return _ratio(log_ratio_T.detach(), trained_T).clamp(max=cap)


def _kl(log_ratio_T: Tensor, trained_T: Tensor) -> Tensor:
    """Unbiased, never negative estimate of KL(p || q) from d = log q - log p, sampled from p."""
    log_ratio_T = _masked(log_ratio_T, trained_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio_T) - log_ratio_T


def _masked(values_T: Tensor, trained_T: Tensor) -> Tensor:
    """Replaces what is not trained by 0: a product would let inf and nan of padding through."""
    return values_T.masked_fill(~trained_T, 0.0)


def _require_tensor(switch: str, value: float | None, name: str, tensor: Tensor | None) -> None:
    if value and tensor is None:
        raise ValueError(f"{switch} = {value}: needs {name}")
