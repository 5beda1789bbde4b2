"""Whether the data files of a config can be used: readable, disjoint, short enough for the model.

Like `model_check`, for `preflight`: every problem is one line that names the key and the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tokenizers import Tokenizer

from megatron_magistral.config import Config
from megatron_magistral.data.schema import Rows, read_problems, read_traces
from megatron_magistral.prompts import load_template, longest_prompt, render_prompt
from megatron_magistral.types import Problem, Trace

_READERS: dict[str, Callable[[Path], Rows]] = {
    "train": read_problems,
    "held_out": read_problems,
    "traces": read_traces,
}

DataRows = Mapping[str, tuple[Problem | Trace, ...]]
"""The usable rows of each file that the config names, by its key."""


def read_data(config: Config) -> tuple[DataRows, list[str], list[str]]:
    """Rows, problems and warnings. A file is a problem when it holds no usable row at all."""
    found: dict[str, tuple[Problem | Trace, ...]] = {}
    problems, warnings = [], []
    for key, read in _READERS.items():
        path = getattr(config.data, key)
        if path is None:
            continue
        try:
            rows = read(path)
        except OSError as error:
            problems.append(f"data.{key} = {path}: cannot be read: {error.strerror}")
            continue
        found[key] = rows.rows
        first = f", the first: {rows.bad[0]}" if rows.bad else ""
        if not rows.rows:
            problems.append(f"data.{key} = {path}: holds no usable row ({rows.summary()}){first}")
        elif rows.bad:
            warnings.append(f"data.{key} = {path}: {rows.summary()}{first}")
    return found, problems + _check_disjoint(config, found), warnings


def check_lengths(config: Config, data: DataRows, context_length: int) -> list[str]:
    """Files of which not one row fits into the model's context. Single rows that do not fit are
    set aside, and named, by the role that reads them.

    `context_length`, tokens, is that of the model directory, whose tokenizer counts.
    """
    assert config.model.path is not None
    tokenizer = Tokenizer.from_file(str(config.model.path / "tokenizer.json"))
    template = load_template(config.data.prompt_file)
    problems = []
    if config.rl is not None:
        room = longest_prompt(context_length, config.rl.microbatch_tokens, config.reward.l_max)
        for key in ("train", "held_out"):
            texts = (render_prompt(row.statement, template) for row in data.get(key, ()))
            shortest = _shortest(tokenizer, texts)
            if shortest > room:
                problems.append(
                    f"data.{key} = {getattr(config.data, key)}: its shortest prompt has {shortest} "
                    f"tokens; reward.l_max = {config.reward.l_max} leaves {room} of the model's "
                    f"{context_length} positions and of "
                    f"rl.microbatch_tokens = {config.rl.microbatch_tokens}"
                )
    if config.sft is not None:
        room = min(context_length, config.sft.microbatch_tokens)
        rows = [row for row in data.get("traces", ()) if isinstance(row, Trace)]
        texts = (render_prompt(row.statement, template) + row.response for row in rows)
        shortest = _shortest(tokenizer, texts)
        if shortest > room:
            problems.append(
                f"data.traces = {config.data.traces}: the shortest has {shortest} tokens; the "
                f"model's {context_length} positions and "
                f"sft.microbatch_tokens = {config.sft.microbatch_tokens} allow {room}"
            )
    return problems


def _check_disjoint(config: Config, data: DataRows) -> list[str]:
    train, held_out = (
        {row.statement for row in data.get(key, ())} for key in ("train", "held_out")
    )
    shared = train & held_out
    if not shared:
        return []
    return [
        f"data.held_out = {config.data.held_out}: {len(shared)} of its problems are in "
        f"data.train = {config.data.train} too, the first: {min(shared)[:60]!r}; what is trained "
        "on is not held out"
    ]


def _shortest(tokenizer: Tokenizer, texts: Iterable[str]) -> int:
    """Tokens of the shortest text; 0 without any."""
    encoded = tokenizer.encode_batch_fast(list(texts))
    return min((len(item.ids) for item in encoded), default=0)
