"""Sampling from one SGLang server: token ids in, token ids, log-probabilities and versions out.

Responses are streamed, so that what a dying server has already sampled is not lost: the caller gets
it with the error and may continue it on any other engine. Cancelling the awaiting task closes the
connection, which makes the server drop the request.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from megatron_magistral.rollout.completion import (
    Chunk,
    CompletionBuilder,
    NewTokens,
    how_ended,
)
from megatron_magistral.rollout.engine import (
    ControlTimeouts,
    EngineControl,
    EngineError,
    EngineRefused,
    Phase,
)
from megatron_magistral.rollout.sglang_server import ModelLimits
from megatron_magistral.types import Completion, FinishReason

# SGLang records a weight update this many tokens early when its overlap scheduler is on.
OVERLAP_LAG_TOKENS = 1


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How to sample. The recorded log-probabilities are those after the temperature is applied.

    A response ends after one of `stop_token_ids` or the model's own end-of-sequence tokens; with
    `ignore_eos` (benchmarks) only after `max_new_tokens`.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class PromptRefused(ValueError):
    """A prompt that must not be sent: a bad id would kill the server."""


class GenerationInterrupted(EngineError):
    """The response broke off. `partial` holds the tokens so far, finish reason ABORT."""

    def __init__(self, engine: str, elapsed_s: float, detail: str, partial: Completion) -> None:
        super().__init__(engine, Phase.GENERATE, elapsed_s, detail)
        self.partial = partial


def check_prompt(prompt_ids: Sequence[int], max_new_tokens: int, limits: ModelLimits) -> None:
    """Refuse what the server could not serve.

    Raises:
        PromptRefused: no prompt, an id outside the vocabulary or more tokens than the context.
    """
    if not prompt_ids:
        raise PromptRefused("empty prompt: a model needs at least one token to start from")
    for position, token in enumerate(prompt_ids):
        if not 0 <= token < limits.vocab_size:
            raise PromptRefused(
                f"prompt id {token} at position {position} is outside [0, {limits.vocab_size}): "
                "does the tokenizer belong to this model?"
            )
    num_tokens = len(prompt_ids) + max_new_tokens
    if max_new_tokens < 1 or num_tokens > limits.context_length:
        raise PromptRefused(
            f"{len(prompt_ids)} prompt tokens + {max_new_tokens} new ones: expected at least one "
            f"new token and at most {limits.context_length} in all (context_length)"
        )


class Generator(EngineControl):
    """Async client of one server; any number of requests may be in flight at once.

    `decode` turns output ids into `Completion.text`, which stays empty without it. A response
    that brings no token for `stall_timeout_s` counts as broken: it must exceed the longest pause
    for a weight update and the longest wait for a place in the running batch. `overlap_schedule`
    must be what the server was started with.
    """

    def __init__(
        self,
        url: str,
        limits: ModelLimits,
        *,
        name: str | None = None,
        timeouts: ControlTimeouts | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        stall_timeout_s: float = 900.0,
        overlap_schedule: bool = False,
    ) -> None:
        super().__init__(url, name=name, timeouts=timeouts)
        self.limits = limits
        self.decode = decode
        self.stall_timeout_s = stall_timeout_s
        self.lag_tokens = OVERLAP_LAG_TOKENS if overlap_schedule else 0
        self._responses: set[aiohttp.ClientResponse] = set()

    async def give_sign_of_life(self, timeout_s: float) -> None:
        """Ask both the HTTP process and the one that generates, which can hang while the other
        lives on: in a collective whose other end is gone, say."""
        start = time.monotonic()
        await super().give_sign_of_life(timeout_s)
        left_s = max(0.1, timeout_s - (time.monotonic() - start))
        await self._call(Phase.READY, "GET", "/server_info", None, left_s)

    def interrupt(self) -> None:
        """Break off every response; each request ends as if the connection had broken."""
        for response in list(self._responses):
            response.close()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        cache_salt: str,
        partial: Completion | None = None,
        on_tokens: Callable[[NewTokens], None] | None = None,
    ) -> Completion:
        """Sample one completion of `prompt_ids`.

        Requests share KV-cache prefixes only if their `cache_salt` is equal: put the policy
        version in it, or a prefix computed by older weights is reused. `partial` is an interrupted
        completion of the same prompt; sampling goes on after its tokens, which count against
        `max_new_tokens`. `on_tokens` is called with each chunk that brings tokens, as it arrives.

        Raises:
            PromptRefused: before anything is sent.
            EngineRefused: the server rejects the request or answers something unreadable.
            GenerationInterrupted: the connection broke, stalled, or the server aborted.
        """
        stop_ids = () if sampling.ignore_eos else sampling.stop_token_ids
        if partial and (ended := how_ended(partial, sampling.max_new_tokens, stop_ids)):
            text = self.decode(partial.output_ids) if self.decode else ""
            return msgspec.structs.replace(partial, finish_reason=ended, text=text)
        num_done = len(partial.output_ids) if partial else 0
        input_ids = [*prompt_ids, *(partial.output_ids if partial else ())]
        num_left = sampling.max_new_tokens - num_done
        check_prompt(input_ids, num_left, self.limits)
        builder = CompletionBuilder(prompt_ids, partial, self.lag_tokens)
        start = time.monotonic()
        try:
            payload = _payload(input_ids, num_left, sampling, cache_salt)
            async with contextlib.aclosing(self._stream(payload)) as chunks:
                async for chunk in chunks:
                    if chunk.error is not None or chunk.meta_info is None:
                        raise self._refused(Phase.GENERATE, start, _describe(chunk))
                    new = builder.add(chunk.meta_info)
                    if on_tokens is not None and new.ids:
                        on_tokens(new)
        except TimeoutError as error:
            detail = f"no token for {self.stall_timeout_s:g} s"
            raise self._interrupted(start, detail, builder) from error
        except (aiohttp.ClientError, OSError) as error:
            detail = f"{type(error).__name__}: {error}"
            raise self._interrupted(start, detail, builder) from error
        except ValueError as error:  # undecodable chunk or unsound spans
            raise self._refused(Phase.GENERATE, start, str(error)) from error
        return self._finished(start, builder)

    def _finished(self, start: float, builder: CompletionBuilder) -> Completion:
        if builder.finish is None:
            raise self._interrupted(start, "the stream ended without a finish reason", builder)
        if builder.finish.type not in (FinishReason.STOP, FinishReason.LENGTH):
            detail = f"{builder.finish.type}: {builder.finish.message}"
            raise self._interrupted(start, detail, builder)
        text = self.decode(builder.output_ids) if self.decode else ""
        return builder.build(FinishReason(builder.finish.type), text)

    async def _stream(self, payload: dict[str, object]) -> AsyncGenerator[Chunk, None]:
        """The server-sent events of one request. An event is `data: <json>` and a blank line."""
        start = time.monotonic()
        decoder = msgspec.json.Decoder(Chunk)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self.stall_timeout_s)
        async with self.session.post(
            self.url + "/generate",
            data=msgspec.json.encode(payload),
            headers={"Content-Type": "application/json"},
            timeout=timeout,
        ) as response:
            if response.status != 200:
                content = (await response.read())[:500].decode(errors="replace")
                raise EngineRefused(
                    self.name,
                    Phase.GENERATE,
                    time.monotonic() - start,
                    f"HTTP {response.status}: {content}",
                )
            self._responses.add(response)
            try:
                buffer = b""
                async for data in response.content.iter_any():
                    *events, buffer = (buffer + data).split(b"\n\n")
                    for event in events:
                        body = event.removeprefix(b"data: ")
                        if body == b"[DONE]":
                            return
                        yield decoder.decode(body)
            finally:
                self._responses.discard(response)

    def _interrupted(
        self, start: float, detail: str, builder: CompletionBuilder
    ) -> GenerationInterrupted:
        partial = builder.build(FinishReason.ABORT)
        return GenerationInterrupted(self.name, time.monotonic() - start, detail, partial)


def _payload(
    input_ids: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingSettings,
    cache_salt: str,
) -> dict[str, object]:
    return {
        "input_ids": input_ids,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": sampling.ignore_eos,
        },
        "return_logprob": True,
        "stream": True,
        "cache_salt": cache_salt,
    }


def _describe(chunk: Chunk) -> str:
    return chunk.error.message if chunk.error else "a chunk without meta_info"
