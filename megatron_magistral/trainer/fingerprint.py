"""Which configuration keys determine what a stage trains, and whether two runs agree on them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_magistral.config import Config

# What may differ when a stage goes on: where it runs and in which layout, how long it goes on, and
# what is measured of it. The trained weights are the same, or as good as the same, either way.
_FREE = (
    *("run.name", "run.directory", "parallel", "checkpoint", "generator", "verifier", "evaluation"),
    *("sft.num_steps", "sft.num_epochs", "sft.validate_every_steps", "sft.candidate_every_steps"),
    *("sft.microbatch_tokens", "sft.optimizer.max_nonfinite_steps"),
    *("rl.num_steps", "rl.microbatch_tokens", "rl.optimizer.max_nonfinite_steps"),
    *("rl.n_async", "rl.queue_size", "rl.max_staleness", "rl.batch_timeout_s"),
    *("rl.kv_budget_tokens", "rl.kv_reserve"),
    *("rl.weight_bucket_mib", "rl.weight_plan", "rl.keep_samples"),
)
# Of no effect on the stage.
_ELSEWHERE = {"sft": ("rl", "reward", "data.held_out"), "rl": ("sft", "data.traces")}


def training_values(config: Config, stage: str) -> dict[str, Any]:
    """The values that determine what `stage` trains, by key: {"rl.optimizer.lr": 1e-6, ...}."""
    left_out = (*_FREE, *_ELSEWHERE[stage])
    return {
        key: value
        for key, value in all_values(config).items()
        if not any(_under(key, other) for other in left_out)
    }


def all_values(config: Config) -> dict[str, Any]:
    """Every value of a config, by key."""
    return dict(_leaves(config.model_dump(mode="json")))


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each key on which the two disagree. A key that one lacks counts as null there."""
    return [
        f"{key} = {now.get(key)!r}, was {saved.get(key)!r}"
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key)
    ]


def _under(key: str, other: str) -> bool:
    """Whether `key` is `other` or in it; a later stage's key counts as that of its section."""
    plain = re.sub(r"^rl\.stages\.\d+\.", "rl.", key)
    return plain == other or plain.startswith(f"{other}.")


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{key}.")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            yield from _leaves({str(place): item for place, item in enumerate(value)}, f"{key}.")
        else:
            yield key, value
