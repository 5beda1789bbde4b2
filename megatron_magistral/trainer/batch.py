"""Sequences packed end to end into the tensors of one microbatch.

Shapes: T tokens of the microbatch, padding included; N segments; R trained rows, that is, output
tokens. Prompts and padding have no row: nothing is projected onto the vocabulary for them.

    tokens_T      [ p p p o o o | p p o o | - - ]     p prompt, o output, - padding
    predicted by       ^ ^ ^       ^ ^                the 5 rows: token t predicts token t + 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from megatron_magistral.algorithm.collate import collate
from megatron_magistral.types import TrainSequence

NO_VERSION = -1


@dataclass(frozen=True)
class PackedBatch:
    """One microbatch. The last segment is padding where `num_padding` > 0.

    Rows are in the order of the sequences, then of their output tokens. `old_logprobs_R` is what
    the ratio is taken against; `generator_logprobs_R` what was recorded when sampling. They are
    the same until `with_old_logprobs` replaces the first.
    """

    tokens_T: Tensor
    cu_seqlens: Tensor
    """int32 [N + 1], cumulative: 0 first, T last."""
    max_seqlen: int
    num_padding: int
    num_slots: int
    """Token slots of the microbatch's budget; what is not filled with tokens is padding."""
    num_sequences: int
    rows_R: Tensor
    """Index in T of the token that predicts this row."""
    targets_R: Tensor
    generator_logprobs_R: Tensor
    old_logprobs_R: Tensor
    versions_R: Tensor
    """Policy version that sampled each row; -1 where none is recorded (a supervised trace)."""
    advantages_R: Tensor
    weights_R: Tensor
    ema_logprobs_R: Tensor | None = None
    """Of the moving average of the weights, where the objective has a KL term."""

    @property
    def num_tokens(self) -> int:
        """Real tokens: without padding."""
        return len(self.tokens_T) - self.num_padding

    def with_old_logprobs(self, logprobs_R: Tensor) -> PackedBatch:
        return replace(self, old_logprobs_R=logprobs_R)

    def with_ema_logprobs(self, logprobs_R: Tensor) -> PackedBatch:
        return replace(self, ema_logprobs_R=logprobs_R)


def pack(
    sequences: Sequence[TrainSequence],
    multiple_of: int = 1,
    device: str | torch.device = "cpu",
    num_slots: int = 0,
) -> PackedBatch:
    """Packs `sequences` in order and pads to a multiple of `multiple_of` tokens.

    A sequence with no recorded log-probabilities (a supervised trace) gets zeros for them. With no
    sequences the batch is all padding: it has no rows, and so no gradient.

    Raises ValueError if a sequence has no prompt (nothing predicts its first token) or not one
    log-probability per output token.
    """
    lengths = [len(s.tokens) for s in sequences]
    num_padding = -sum(lengths) % multiple_of or (0 if lengths else multiple_of)
    segments = [*lengths, num_padding] if num_padding else lengths
    starts = list(accumulate(segments, initial=0))
    tokens: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    advantages: list[float] = []
    weights: list[float] = []
    for start, sequence in zip(starts, sequences, strict=False):
        _check(sequence)
        prompt, count = sequence.num_prompt_tokens, sequence.num_output_tokens
        tokens += sequence.tokens
        rows += range(start + prompt - 1, start + prompt - 1 + count)
        targets += sequence.tokens[prompt:]
        logprobs += sequence.logprobs or (0.0,) * count
        versions += _versions(sequence)
        advantages += [sequence.advantage] * count
        weights += [sequence.weight] * count
    tokens += [0] * num_padding

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def ints(values: list[int], dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    generator_logprobs_R = floats(logprobs)
    return PackedBatch(
        tokens_T=ints(tokens),
        cu_seqlens=ints(starts, torch.int32),
        max_seqlen=max(segments),
        num_padding=num_padding,
        num_slots=max(num_slots, len(tokens)),
        num_sequences=len(sequences),
        rows_R=ints(rows),
        targets_R=ints(targets),
        generator_logprobs_R=generator_logprobs_R,
        old_logprobs_R=generator_logprobs_R,
        versions_R=ints(versions),
        advantages_R=floats(advantages),
        weights_R=floats(weights),
    )


def pack_microbatches(
    sequences: Sequence[TrainSequence],
    max_tokens: int,
    multiple_of: int = 1,
    device: str | torch.device = "cpu",
) -> list[PackedBatch]:
    """Collates `sequences` into microbatches of at most `max_tokens` tokens. At least one
    microbatch, which may be all padding: a rank with no sequences must still take part in the
    collectives of the step. Raises ValueError if a sequence is longer than `max_tokens`."""
    plan = collate([len(s.tokens) for s in sequences], max_tokens) or [[]]
    return [
        pack([sequences[i] for i in indices], multiple_of, device, num_slots=max_tokens)
        for indices in plan
    ]


def _versions(sequence: TrainSequence) -> list[int]:
    if not sequence.spans:
        return [NO_VERSION] * sequence.num_output_tokens
    return [span.version for span in sequence.spans for _ in range(span.start, span.end)]


def _check(sequence: TrainSequence) -> None:
    if sequence.num_prompt_tokens < 1:
        raise ValueError("num_prompt_tokens = 0: a sequence needs a token that predicts its output")
    if sequence.logprobs and len(sequence.logprobs) != sequence.num_output_tokens:
        raise ValueError(
            f"{len(sequence.logprobs)} log-probabilities for {sequence.num_output_tokens} output "
            "tokens: must be one each"
        )
    if sequence.spans and sequence.spans[-1].end != sequence.num_output_tokens:
        raise ValueError(
            f"version spans end at {sequence.spans[-1].end}: must cover all "
            f"{sequence.num_output_tokens} output tokens"
        )
