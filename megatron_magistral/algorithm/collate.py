"""Greedy collation: sequences into microbatches of a fixed token budget (section 3).

Gradients accumulate over microbatches, so the order of sequences is free. `collate` is the paper's
choice, descending first fit. The two baselines are what it is compared with: a padding number means
nothing without them.

Invariants:

1. Every sequence is in exactly one microbatch, and no microbatch exceeds the budget.
2. No sequence would fit into an earlier microbatch than its own.
3. At most 11/9 * optimum + 6/9 microbatches (Dosa 2007). An order that happens to list the
   sequences of an optimal packing one microbatch after another can still make sequential fill
   better on that input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Microbatches = list[list[int]]
"""Indices of sequences, one list per microbatch."""


def collate(lengths: Sequence[int], max_tokens: int) -> Microbatches:
    """Longest first, each into the first microbatch with room, else into a new one.

    Ties keep the given order. Raises ValueError if a length is not in [1, max_tokens].
    """
    descending = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return _first_fit(descending, lengths, max_tokens)


def unsorted_first_fit(lengths: Sequence[int], max_tokens: int) -> Microbatches:
    """Baseline: first fit in order of arrival."""
    return _first_fit(range(len(lengths)), lengths, max_tokens)


def sequential_fill(lengths: Sequence[int], max_tokens: int) -> Microbatches:
    """Baseline: fill one microbatch in order of arrival, close it when the next does not fit."""
    _check(lengths, max_tokens)
    microbatches: Microbatches = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room:
            microbatches.append([])
            room = max_tokens
        microbatches[-1].append(index)
        room -= length
    return microbatches


def lower_bound(lengths: Sequence[int], max_tokens: int) -> int:
    """What no packing can beat: the number of full microbatches that all tokens fill."""
    return -(-sum(lengths) // max_tokens)


def padding_fraction(lengths: Sequence[int], num_microbatches: int, max_tokens: int) -> float:
    """Share of the token slots of `num_microbatches` full-size microbatches that hold no token."""
    if num_microbatches == 0:
        return 0.0
    return 1 - sum(lengths) / (num_microbatches * max_tokens)


@dataclass(frozen=True)
class CollationReport:
    """Microbatches that each method needs for the same sequences."""

    num_tokens: int
    max_tokens: int
    greedy: int
    sequential_fill: int
    unsorted_first_fit: int
    lower_bound: int

    @property
    def padding_fraction(self) -> float:
        return self._padding(self.greedy)

    @property
    def saved_fraction(self) -> float:
        """Padding of sequential fill minus ours, in fractions of the token slots."""
        return self._padding(self.sequential_fill) - self.padding_fraction

    def _padding(self, num_microbatches: int) -> float:
        return padding_fraction([self.num_tokens], num_microbatches, self.max_tokens)


def collation_report(lengths: Sequence[int], max_tokens: int) -> CollationReport:
    return CollationReport(
        num_tokens=sum(lengths),
        max_tokens=max_tokens,
        greedy=len(collate(lengths, max_tokens)),
        sequential_fill=len(sequential_fill(lengths, max_tokens)),
        unsorted_first_fit=len(unsorted_first_fit(lengths, max_tokens)),
        lower_bound=lower_bound(lengths, max_tokens),
    )


def _first_fit(order: Iterable[int], lengths: Sequence[int], max_tokens: int) -> Microbatches:
    _check(lengths, max_tokens)
    microbatches: Microbatches = []
    rooms = _FirstWithRoom(len(lengths), max_tokens)
    for index in order:
        slot = rooms.take(lengths[index])
        if slot == len(microbatches):
            microbatches.append([])
        microbatches[slot].append(index)
    return microbatches


class _FirstWithRoom:
    """A binary tree of maxima over slots: finds the first slot with room in O(log n)."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self._num_leaves = 1 << max(num_slots - 1, 0).bit_length()
        self._rooms = [max_tokens] * (2 * self._num_leaves)

    def take(self, num_tokens: int) -> int:
        """Puts `num_tokens` into the first slot with room and returns its index."""
        rooms = self._rooms
        node = 1
        while node < self._num_leaves:
            node *= 2
            if rooms[node] < num_tokens:
                node += 1
        slot = node - self._num_leaves
        rooms[node] -= num_tokens
        while node > 1:
            node //= 2
            rooms[node] = max(rooms[2 * node], rooms[2 * node + 1])
        return slot


def _check(lengths: Sequence[int], max_tokens: int) -> None:
    for index, length in enumerate(lengths):
        if not 1 <= length <= max_tokens:
            raise ValueError(
                f"sequence {index} has {length} tokens: must be between 1 and the "
                f"microbatch budget of {max_tokens} tokens"
            )
