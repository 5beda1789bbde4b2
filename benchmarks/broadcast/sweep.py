"""Many settings, one run each, in bounded time: bucket sizes times world sizes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from benchmarks.broadcast.launch import RankFailed
from benchmarks.broadcast.results import Options, Result

MIB = 1 << 20
BUCKET_SHARES = (8, 4, 2, 1)  # of the size that was asked for


@dataclass(frozen=True)
class Skipped:
    """A setting that has no result, and why."""

    options: Options
    why: str

    def __str__(self) -> str:
        trainer, generator = self.options.trainer, self.options.generator
        return (
            f"trainer TP {trainer.tp} PP {trainer.pp}, {generator.replicas} generators of TP "
            f"{generator.tp}, buckets of {self.options.bucket_bytes / MIB:g} MiB: {self.why}"
        )


def settings_of(options: Options) -> list[Options]:
    """Buckets of the size given, a half, a quarter and an eighth of it; 1, 2, 4, ... generators up
    to the number given. Largest worlds first: ranks of a launcher that are not needed any more can
    go home."""
    replicas = [options.generator.replicas]
    while replicas[-1] > 1:
        replicas.append(1 << (replicas[-1] - 1).bit_length() - 1)
    if options.engine_urls:
        replicas = replicas[:1]  # engines are there or not: their number is no choice of ours
    return [
        replace(
            options,
            generator=replace(options.generator, replicas=number),
            bucket_bytes=options.bucket_bytes // share,
        )
        for number in replicas
        for share in BUCKET_SHARES
    ]


def sweep(
    settings: Sequence[Options], run: Callable[[Options], Result], limit_s: float
) -> Iterator[tuple[Options, Result] | Skipped]:
    """Every setting as it ends. One that fails is told and the others go on; after `limit_s`
    no further one is begun."""
    start = time.monotonic()
    for setting in settings:
        if time.monotonic() - start > limit_s:
            yield Skipped(setting, f"not begun: the {limit_s:g} s are over")
            continue
        try:
            yield setting, run(setting)
        except RankFailed as error:
            yield Skipped(setting, str(error))


def sweep_as_rank(
    settings: Sequence[Options], run: Callable[[Options], Result | None]
) -> Iterator[tuple[Options, Result]]:
    """The same in a process that a launcher has started as one of many: all do the same settings in
    the same order, as long as they are needed. Results on rank 0 alone.

    A failure ends the sweep, and a launcher ends the other ranks.
    """
    for number, setting in enumerate(settings):
        if int(os.environ["RANK"]) >= setting.world_size:
            return
        with smaller_world(os.environ, setting.world_size, number):
            result = run(setting)
        if result is not None:
            yield setting, result


@contextmanager
def smaller_world(
    environment: MutableMapping[str, str], world_size: int, number: int
) -> Iterator[None]:
    """For run `number`, the first `world_size` ranks of a launcher are all there are. They meet on
    a port of their own: a store that served another run holds its keys."""
    names = ("WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    before = {name: environment.get(name) for name in names}
    environment["WORLD_SIZE"] = str(world_size)
    environment["MASTER_PORT"] = str(int(environment["MASTER_PORT"]) + 1 + number)
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
