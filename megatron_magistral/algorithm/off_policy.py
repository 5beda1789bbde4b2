"""How far trained tokens are from the policy that trains on them, by their age.

The age of a token is the trainer's version less the version that sampled it. Weights that are
updated in the middle of a completion (arXiv 2506.10910, section 3) make ages differ within one
sequence; if old tokens are much less likely under the trainer than under their generator, the data
is too far off-policy for the clipping range.

Shapes: R trained rows (output tokens) of one microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_magistral.types import Span

# Ages that are told apart; the last bucket holds all older ones.
AGE_BUCKETS = ("0", "1", "2", "3", "4_or_more")
_GAP, _COUNT = "log_ratio_abs_age_{}", "tokens_age_{}"


def token_ages(spans_of: Iterable[Sequence[Span]], version: int) -> Counter[int]:
    """How many tokens have which age, in policy versions, when `version` is the newest."""
    ages: Counter[int] = Counter()
    for spans in spans_of:
        for span in spans:
            ages[version - span.version] += span.end - span.start
    return ages


def gap_sums(
    logprobs_R: Tensor, behaviour_logprobs_R: Tensor, ages_R: Tensor, trained_R: Tensor
) -> dict[str, Tensor]:
    """Sums of |log(trainer / generator)| over the trained rows of each age, and their numbers.

    Plain sums: add them up over microbatches and ranks; `gap_means` makes means of them.
    """
    gap_R = (logprobs_R - behaviour_logprobs_R).abs()
    bucket_R = ages_R.clamp(0, len(AGE_BUCKETS) - 1)
    sums: dict[str, Tensor] = {}
    for index, bucket in enumerate(AGE_BUCKETS):
        mine_R = trained_R & (bucket_R == index)
        # masked_fill and not a product: what is not trained may be inf or nan
        sums[_GAP.format(bucket)] = gap_R.masked_fill(~mine_R, 0.0).sum()
        sums[_COUNT.format(bucket)] = mine_R.sum().to(torch.float32)
    return sums


def gap_means(sums: Mapping[str, float]) -> dict[str, float]:
    """The mean gap of each age that has tokens, and the share of trained tokens of each age."""
    counts = {bucket: sums[_COUNT.format(bucket)] for bucket in AGE_BUCKETS}
    total = sum(counts.values())
    means = {}
    for bucket, count in counts.items():
        means[f"token_share_age_{bucket}"] = count / total if total else 0.0
        if count:
            means[_GAP.format(bucket)] = sums[_GAP.format(bucket)] / count
    return means


def without_gaps(sums: Mapping[str, float]) -> dict[str, float]:
    """The other sums."""
    ours = {form.format(bucket) for bucket in AGE_BUCKETS for form in (_GAP, _COUNT)}
    return {name: value for name, value in sums.items() if name not in ours}
