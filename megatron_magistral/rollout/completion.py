"""From the chunks of a streamed response to a `Completion`. Pure.

SGLang streams disjoint segments; the last one carries the version spans of the whole response.
Chunks before it only say which version the server held when the chunk left it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from megatron_magistral.rollout.engine import parse_version
from megatron_magistral.types import Completion, FinishReason, Span


class ChunkFinish(msgspec.Struct):
    type: str
    message: str | None = None


class ChunkSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class ChunkMeta(msgspec.Struct):
    weight_version: str
    finish_reason: ChunkFinish | None = None
    # (log-probability, token id, text) of every token of this chunk
    output_token_logprobs: list[tuple[float, int, Any]] = []
    weight_versions: list[ChunkSpan] | None = None
    # tokens of the response so far, whether or not their log-probabilities came
    completion_tokens: int | None = None

    @property
    def is_abort(self) -> bool:
        return self.finish_reason is not None and self.finish_reason.type == FinishReason.ABORT


class ChunkError(msgspec.Struct):
    message: str


class Chunk(msgspec.Struct):
    """One server-sent event of `/generate`."""

    meta_info: ChunkMeta | None = None
    error: ChunkError | None = None


def shift_spans(spans: Sequence[Span], lag_tokens: int) -> tuple[Span, ...]:
    """Correct spans for a scheduler that runs `lag_tokens` steps ahead of the device.

    With SGLang's overlap scheduler a version change is recorded when one token of each running
    request, already computed by the old weights, has not been counted yet: every inner boundary is
    that much too early. Spans that this leaves empty disappear.
    """
    if not spans:
        return ()
    num_tokens = spans[-1].end
    bounds = [0, *(min(span.end + lag_tokens, num_tokens) for span in spans[:-1]), num_tokens]
    return tuple(
        Span(span.version, start, end)
        for span, (start, end) in zip(spans, pairwise(bounds), strict=True)
        if start < end
    )


def merge_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Join neighbours of equal version."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].version == span.version:
            merged[-1] = Span(span.version, merged[-1].start, span.end)
        else:
            merged.append(span)
    return tuple(merged)


def parse_spans(reported: Sequence[ChunkSpan], num_tokens: int) -> tuple[Span, ...]:
    """Read the server's spans of `num_tokens` output tokens.

    Raises:
        ValueError: they leave a gap, overlap, go back in version or do not cover all tokens.
    """
    spans = tuple(Span(parse_version(span.version), span.start, span.end) for span in reported)
    spans = tuple(span for span in spans if span.start < span.end)
    bounds = [0, *(span.end for span in spans)]
    versions = [span.version for span in spans]
    covered = [span.start for span in spans] == bounds[:-1] and bounds[-1] == num_tokens
    if not covered or versions != sorted(versions):
        described = [(span.version, span.start, span.end) for span in reported]
        raise ValueError(f"version spans {described} do not cover {num_tokens} output tokens")
    return spans


class NewTokens(msgspec.Struct, frozen=True):
    """Output tokens from `start` on, as one chunk brought them."""

    start: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


def how_ended(
    partial: Completion, max_new_tokens: int, stop_token_ids: Collection[int]
) -> FinishReason | None:
    """How an interrupted completion had ended, if only the word of it got lost."""
    if partial.output_ids and partial.output_ids[-1] in stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(partial.output_ids) >= max_new_tokens else None


class CompletionBuilder:
    """Collects the chunks of one response, after the tokens of an interrupted one if there is one.

    Until the response has finished, spans are those of the chunks: exact but for the chunk that
    straddles an update, all of whose tokens count as the newer version.
    """

    def __init__(self, prompt_ids: Sequence[int], partial: Completion | None, lag_tokens: int):
        self.prompt_ids = tuple(prompt_ids)
        self.finish: ChunkFinish | None = None
        self._num_resumed = len(partial.output_ids) if partial else 0
        self._output_ids = list(partial.output_ids) if partial else []
        self._logprobs = list(partial.logprobs) if partial else []
        self._resumed_spans = partial.spans if partial else ()
        self._spans: list[Span] = []
        self._lag_tokens = lag_tokens

    def add(self, meta: ChunkMeta) -> NewTokens:
        """Take one chunk and return what it brought.

        Raises:
            ValueError: a token has no log-probability, or the spans that the last chunk reports
                are not sound.
        """
        new = NewTokens(
            start=len(self._output_ids),
            ids=tuple(token for _, token, _ in meta.output_token_logprobs),
            logprobs=tuple(logprob for logprob, _, _ in meta.output_token_logprobs),
            version=parse_version(meta.weight_version),
        )
        self._output_ids += new.ids
        self._logprobs += new.logprobs
        if new.ids:
            self._spans.append(Span(new.version, new.start, len(self._output_ids)))
        num_new = len(self._output_ids) - self._num_resumed
        if meta.completion_tokens not in (None, num_new) and not meta.is_abort:
            raise ValueError(
                f"{meta.completion_tokens} tokens were sampled, {num_new} came with a "
                "log-probability"
            )
        self.finish = meta.finish_reason
        if self.finish is not None and meta.weight_versions is not None:
            self._spans = list(self._reported_spans(meta.weight_versions))
        return new

    def build(self, finish_reason: FinishReason, text: str = "") -> Completion:
        return Completion(
            prompt_ids=self.prompt_ids,
            output_ids=tuple(self._output_ids),
            logprobs=tuple(self._logprobs),
            spans=merge_spans([*self._resumed_spans, *self._spans]),
            finish_reason=finish_reason,
            text=text,
        )

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(self._output_ids)

    def _reported_spans(self, reported: Sequence[ChunkSpan]) -> list[Span]:
        offset = self._num_resumed
        spans = parse_spans(reported, len(self._output_ids) - offset)
        return [
            Span(span.version, span.start + offset, span.end + offset)
            for span in shift_spans(spans, self._lag_tokens)
        ]
