"""The same text scored by the trainer and by an engine that got its weights, after every update.

Checksums prove that the bits arrived; the probe shows what engine and trainer compute with them.
Their log-probabilities of a fixed text never agree exactly (other kernels, another dtype), so it is
the difference's growth that tells of a fault.

    T  tokens of the probe
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from megatron_magistral.rollout.engine import (
    EngineControl,
    EngineMismatch,
    EngineRefused,
    Phase,
    parse_version,
)


class _Meta(msgspec.Struct):
    weight_version: str
    # (log-probability, token id, text); the first token has no log-probability
    input_token_logprobs: list[tuple[float | None, int, object]]


class _Reply(msgspec.Struct):
    meta_info: _Meta


@dataclass(frozen=True)
class ProbeGap:
    """Absolute differences of log-probabilities over the probe, in nats."""

    mean: float
    max: float


@dataclass(frozen=True)
class AlarmSettings:
    """When a gap counts as growing: see `is_drifting`."""

    factor: float = 4.0
    patience: int = 3
    window: int = 64
    min_history: int = 8
    floor: float = 1e-5
    """Nats below which a median is rounding; an alarm needs more than `factor` times this."""


async def score_on_engine(
    engine: EngineControl, token_ids: Sequence[int], version: int
) -> list[float]:
    """Log-probabilities [T - 1] of all tokens but the first, by weights of `version`.

    Raises:
        EngineMismatch: the engine computed them with another version.
    """
    start = time.monotonic()
    payload = {
        "input_ids": token_ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "cache_salt": f"probe-v{version}",  # no prefix that older weights computed
    }
    answer = await engine.post(Phase.PROBE, "/generate", payload, engine.timeouts.probe_s)
    try:
        meta = msgspec.convert(answer, _Reply).meta_info
        scored = parse_version(meta.weight_version)
        logprobs = [float(x) for x, _, _ in meta.input_token_logprobs[1:] if x is not None]
    except (msgspec.ValidationError, ValueError) as error:
        elapsed_s = time.monotonic() - start
        raise EngineRefused(engine.name, Phase.PROBE, elapsed_s, str(error)) from error
    if scored != version or len(logprobs) != len(token_ids) - 1:
        detail = (
            f"version {version} and {len(token_ids) - 1} log-probabilities were expected, "
            f"version {scored} and {len(logprobs)} came"
        )
        raise EngineMismatch(engine.name, Phase.PROBE, time.monotonic() - start, detail)
    return logprobs


def probe_gap(ours: Sequence[float], theirs: Sequence[float]) -> ProbeGap:
    """How far two scorings of the same tokens are apart."""
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return ProbeGap(statistics.fmean(gaps), max(gaps))


def is_drifting(gaps: Sequence[float], settings: AlarmSettings) -> bool:
    """Whether the last `patience` gaps all exceed `factor` times the median of those before them.

    One outlier raises no alarm, and hardly moves the median. The median is that of at most
    `window` gaps; with fewer than `min_history` before the last ones there is no verdict.
    """
    before, last = gaps[: -settings.patience], gaps[-settings.patience :]
    if len(before) < settings.min_history:
        return False
    usual = max(statistics.median(before[-settings.window :]), settings.floor)
    return all(not gap <= settings.factor * usual for gap in last)  # nan is no small gap
