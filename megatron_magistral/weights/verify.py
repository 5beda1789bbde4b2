"""Checks an update end to end: what was sent is in the manifest, and what arrived is what was sent.

One `Verifier` belongs to the engines of one connection. Digests of the tensors to check are taken
by each rank that sends, from the bytes on their way to the wire, of exactly the elements that some
engine rank holds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from megatron_magistral.rollout.engine import (
    EngineControl,
    EngineMismatch,
    EngineRefused,
    Phase,
    TensorSpec,
)
from megatron_magistral.weights.checksum import ChecksumSettings, digest, head, names_to_check
from megatron_magistral.weights.flatten import FlatBucket, LooseBucket
from megatron_magistral.weights.manifest import Layout, some
from megatron_magistral.weights.parts import View

# By tensor: the elements of it that some engine rank holds.
Views = Mapping[str, frozenset[View]]
Digests = dict[tuple[str, View], int]


class Digester:
    """Takes digests of what one rank sends. `views` covers at least all that it sends."""

    def __init__(self, views: Views) -> None:
        self._views = views
        self._chosen: frozenset[str] = frozenset()
        self._digests: dict[tuple[str, View], Tensor] = {}

    def begin(self, chosen: frozenset[str]) -> None:
        """An update begins of which the tensors `chosen` are checked."""
        self._chosen = chosen
        self._digests = {}

    def add(self, bucket: FlatBucket | LooseBucket) -> None:
        """Take the digests of a bucket that is being sent: if no tensor of it is chosen, of the
        head of one, so that buckets of equal shapes that an engine took for each other are found
        out."""
        chosen = self._chosen.intersection(spec.name for spec in bucket.specs)
        witness = "" if chosen else _distinctive(bucket)
        for name, tensor in bucket.tensors():
            if name in chosen or name == witness:
                for view in self._views[name]:
                    held = view.into(tensor)
                    self._digests[name, view] = digest(held if name in chosen else head(held))

    def values(self) -> Digests:
        """Those of all buckets since `begin`; waits for them, where a GPU computes them."""
        return {key: int(value) for key, value in self._digests.items()}


class Verifier:
    """`layouts` says, by engine, which elements of which tensor each rank holds."""

    def __init__(
        self,
        manifest: Sequence[TensorSpec],
        layouts: Mapping[str, Layout],
        settings: ChecksumSettings,
    ) -> None:
        self._expected = {spec.name: spec for spec in manifest}
        self._layouts = layouts
        self._settings = settings
        self._is_first = True
        self._names: list[str] = []
        self._chosen: frozenset[str] = frozenset()
        self._question: dict[str, list[str]] = {}  # the same to every engine
        self._unsent: set[str] = set()
        self._digests: Digests = {}

    @property
    def num_checked(self) -> int:
        """Tensors that the present update checks, or the heads of."""
        return len(self._names)

    @property
    def views(self) -> Views:
        """What of each tensor the engines hold."""
        return {
            name: frozenset(
                view for layout in self._layouts.values() for rank in layout[name] for view in rank
            )
            for name in self._expected
        }

    def begin(self, version: int) -> frozenset[str]:
        """An update to `version` begins. The tensors that it checks, beside the head of one of each
        other bucket; the first update of a group is checked as a whole."""
        self._unsent = set(self._expected)
        names = list(self._expected)
        chosen = names_to_check(names, version, self._settings, first=self._is_first)
        self._chosen = frozenset(chosen)
        return self._chosen

    def stranger(self, specs: Sequence[TensorSpec]) -> str:
        """What of a bucket is not in the manifest as it is; empty if nothing is."""
        for spec in specs:
            expected = self._expected.get(spec.name)
            if spec != expected:
                return f"{spec} was to be sent, the manifest has {expected}"
        return ""

    def sent(self, specs: Sequence[TensorSpec]) -> None:
        """A bucket is on its way."""
        self._unsent.difference_update(spec.name for spec in specs)

    def unsent(self) -> str:
        """Names of the tensors that no bucket held; empty if there are none."""
        return some(sorted(self._unsent))

    def expect(self, digests: Digests) -> None:
        """Everything was sent; `digests` of it are what engines must have, too."""
        self._digests = digests
        self._names = list(dict.fromkeys(name for name, _ in digests))
        self._question = {
            "digest": [name for name in self._names if name in self._chosen],
            "heads": [name for name in self._names if name not in self._chosen],
        }
        self._is_first = False

    async def compare(self, engine: EngineControl, version: int) -> None:
        """Read back the digests of `engine` and compare them.

        Raises:
            EngineMismatch: names every tensor whose bits are not those that were sent.
        """
        start = time.monotonic()
        timeout_s = engine.timeouts.checksum_s
        answers = await engine.ask_about_weights(Phase.CHECKSUM, self._question, timeout_s)
        try:
            ranks = msgspec.convert(answers, list[dict[str, list[int]]])
        except msgspec.ValidationError as error:
            elapsed_s = time.monotonic() - start
            raise EngineRefused(engine.name, Phase.CHECKSUM, elapsed_s, str(error)) from error
        if wrong := self._differences(engine.name, ranks):
            detail = f"version {version}: bits differ from those sent: {some(wrong)}"
            raise EngineMismatch(engine.name, Phase.CHECKSUM, time.monotonic() - start, detail)

    def _differences(self, engine: str, ranks: Sequence[Mapping[str, list[int]]]) -> list[str]:
        layout = self._layouts[engine]
        return [
            f"{name} (rank {number})"
            for name in self._names
            for number, (rank, views) in enumerate(zip(ranks, layout[name], strict=True))
            if rank.get(name) != [self._digests[name, view] for view in views]
        ]


def _distinctive(bucket: FlatBucket | LooseBucket) -> str:
    """The smallest matrix: vectors, as those of norms, may be alike in all layers."""
    return min(bucket.specs, key=lambda s: (len(s.shape) < 2, torch.Size(s.shape).numel())).name
