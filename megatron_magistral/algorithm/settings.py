"""The switches of the learning rule (arXiv 2506.10910, sections 2.1, 6.3, 6.4 and 7.4)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NormaliseAdvantage(StrEnum):
    """What a centred advantage is divided by (section 6.4)."""

    MINIBATCH = "minibatch"
    GROUP = "group"
    NONE = "none"


class NormaliseLoss(StrEnum):
    """What a token's loss is divided by.

    GROUP: tokens of its group, then the mean over groups (the paper).
    TOKEN: tokens of the minibatch.
    SEQUENCE: tokens of its completion, then the mean over completions (GRPO).
    """

    GROUP = "group"
    TOKEN = "token"
    SEQUENCE = "sequence"


@dataclass(frozen=True)
class AlgorithmSettings:
    """The learning rule of one stage; the defaults are the paper's.

    Raises ValueError for a value out of range or a switch that lacks the one it builds on.
    """

    eps_low: float = 0.2
    eps_high: float = 0.28
    normalise_advantage: NormaliseAdvantage = NormaliseAdvantage.MINIBATCH
    normalise_loss: NormaliseLoss = NormaliseLoss.GROUP
    num_minibatches: int = 1
    """Optimizer steps per batch, n_batch / n_minibatch."""
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    """Weight of the KL to the exponential moving average of the weights; 0 keeps no average."""
    ema_decay: float = 0.99
    recompute_old_logprobs: bool = False
    """Take the denominator of the ratio from the trainer's own forward pass before the step."""
    tis_cap: float | None = None
    """Bound of the truncated importance weight trainer / generator; needs recomputed log-probs."""

    def __post_init__(self) -> None:
        _require("eps_low", self.eps_low, "in (0, 1)", 0 < self.eps_low < 1)
        _require("eps_high", self.eps_high, "> 0", self.eps_high > 0)
        _require("num_minibatches", self.num_minibatches, ">= 1", self.num_minibatches >= 1)
        _require("entropy_coef", self.entropy_coef, ">= 0", self.entropy_coef >= 0)
        _require("kl_coef", self.kl_coef, ">= 0", self.kl_coef >= 0)
        _require("ema_decay", self.ema_decay, "in [0, 1)", 0 <= self.ema_decay < 1)
        if self.tis_cap is not None:
            _require("tis_cap", self.tis_cap, "> 0", self.tis_cap > 0)
            _require(
                "tis_cap",
                self.tis_cap,
                "null unless recompute_old_logprobs is true",
                self.recompute_old_logprobs,
            )


def _require(name: str, value: object, rule: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"{name} = {value!r}: must be {rule}")
