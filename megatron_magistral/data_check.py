"""Whether the data files of a config can be used: readable, disjoint, short enough for the model.

Like `model_check`, for `preflight`: every problem is one line that names the key and the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_magistral.config import Config
from megatron_magistral.data.schema import Rows, read_problems, read_traces
from megatron_magistral.prompt_room import longest_prompt
from megatron_magistral.prompts import load_template, render_prompt, trace_prompt
from megatron_magistral.types import Problem, Trace

DataRows = Mapping[str, tuple[Problem | Trace, ...]]
"""The usable rows of each file that the config names, by its key."""

HELD_OUT, TRACES = "data.held_out", "data.traces"


def data_files(config: Config) -> dict[str, Path]:
    """The files that the config names, by key."""
    files = {f"data.{name}": getattr(config.data, name) for name in ("train", "held_out", "traces")}
    for index, stage in enumerate(config.rl.stages if config.rl is not None else ()):
        files[f"rl.stages.{index}.add_problems"] = stage.add_problems
    return {key: path for key, path in files.items() if path is not None}


def read_data(config: Config) -> tuple[DataRows, list[str], list[str]]:
    """Rows, problems and warnings. A file is a problem when it holds no usable row at all."""
    found: dict[str, tuple[Problem | Trace, ...]] = {}
    problems, warnings = [], []
    for key, path in data_files(config).items():
        try:
            rows: Rows[Any] = read_traces(path) if key == TRACES else read_problems(path)
        except OSError as error:
            problems.append(f"{key} = {path}: cannot be read: {error.strerror}")
            continue
        found[key] = rows.rows
        first = f", the first: {rows.bad[0]}" if rows.bad else ""
        if not rows.rows:
            problems.append(f"{key} = {path}: holds no usable row ({rows.summary()}){first}")
        elif rows.bad:
            warnings.append(f"{key} = {path}: {rows.summary()}{first}")
    problems += [*_check_disjoint(config, found), *_check_ids(config, found)]
    return found, problems, warnings


def check_lengths(config: Config, data: DataRows, context_length: int) -> list[str]:
    """Files of which not one row fits into the model's context. Single rows that do not fit are
    set aside, and named, by the role that reads them.

    `context_length`, tokens, is that of the model directory, whose tokenizer counts.
    """
    assert config.model.path is not None
    tokenizer = Tokenizer.from_file(str(config.model.path / "tokenizer.json"))
    template = load_template(config.data.prompt_file)
    files = data_files(config)
    problems = []
    if config.rl is not None:
        room = longest_prompt(config, context_length)
        for key in [key for key in data if key != TRACES]:
            texts = (render_prompt(row.statement, template) for row in data[key])
            shortest = _shortest(tokenizer, texts)
            if shortest > room.num_tokens:
                problems.append(
                    f"{key} = {files[key]}: its shortest prompt has {shortest} tokens; {room.why}"
                )
    if config.sft is not None:
        most = min(context_length, config.sft.microbatch_tokens)
        rows = [row for row in data.get(TRACES, ()) if isinstance(row, Trace)]
        texts = (trace_prompt(row, template) + row.response for row in rows)
        shortest = _shortest(tokenizer, texts)
        if shortest > most:
            problems.append(
                f"data.traces = {config.data.traces}: the shortest has {shortest} tokens; the "
                f"model's {context_length} positions and "
                f"sft.microbatch_tokens = {config.sft.microbatch_tokens} allow {most}"
            )
    return problems


def _check_disjoint(config: Config, data: DataRows) -> list[str]:
    held_out = {row.statement for row in data.get(HELD_OUT, ())}
    files = data_files(config)
    problems = []
    for key in _training(data):
        if shared := held_out & {row.statement for row in data[key]}:
            problems.append(
                f"{HELD_OUT} = {files[HELD_OUT]}: {len(shared)} of its problems are in "
                f"{key} = {files[key]} too, the first: {min(shared)[:60]!r}; what is trained "
                "on is not held out"
            )
    return problems


def _check_ids(config: Config, data: DataRows) -> list[str]:
    """Each file has unique ids; so must all that are trained on together."""
    files = data_files(config)
    owner: dict[str, str] = {}
    problems = []
    for key in _training(data):
        ids = [row.id for row in data[key] if isinstance(row, Problem)]
        if shared := [id for id in ids if id in owner]:
            problems.append(
                f"{key} = {files[key]}: {len(shared)} of its ids are in {owner[shared[0]]} too, "
                f"the first: {shared[0]!r}; give each problem an id of its own"
            )
        owner |= {id: key for id in ids if id not in owner}
    return problems


def _training(data: DataRows) -> list[str]:
    """Keys of the files that hold problems to train on."""
    return [key for key in data if key not in (HELD_OUT, TRACES)]


def _shortest(tokenizer: Tokenizer, texts: Iterable[str]) -> int:
    """Tokens of the shortest text; 0 without any."""
    encoded = tokenizer.encode_batch_fast(list(texts))
    return min((len(item.ids) for item in encoded), default=0)
