"""Whether a reference answer can be verified at all, for the curation of a data set.

A reference that does not match itself after a harmless rewrite would pay nobody, one that is
compared as words only would pay nobody who writes other words; both should leave the data set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from .answers import Answer, Assignment, Conditions, Phrase, Sequence_, Words
from .checker import check, read_reference
from .result import MathVerdict


class ReferenceStatus(Enum):
    """Why a reference is, or is not, fit for training."""

    VERIFIABLE = "verifiable"
    WORDS_ONLY = "words_only"
    """Readable, but compared word by word: fit only if the answer can be said in one way."""
    UNREADABLE = "unreadable"
    TOO_BIG = "too_big"
    UNSTABLE = "unstable"
    """Not equal to itself, or to a rewrite that keeps its meaning."""


@dataclass(frozen=True)
class ReferenceAudit:
    """The status of one reference and the reason for it."""

    status: ReferenceStatus
    reason: str = ""


def audit_reference(reference: str) -> ReferenceAudit:
    """Read the reference, then check it against its own rewrites."""
    reading = read_reference(reference)
    if reading.problem is not None:
        is_big = reading.problem.verdict is MathVerdict.TOO_BIG
        status = ReferenceStatus.TOO_BIG if is_big else ReferenceStatus.UNREADABLE
        return ReferenceAudit(status, reading.problem.reason)
    for rewrite in rewrites(reference):
        result = check(reference, rewrite)
        if result.verdict is not MathVerdict.CORRECT:
            return ReferenceAudit(
                ReferenceStatus.UNSTABLE, f"{rewrite!r}: {result.verdict.value}, {result.reason}"
            )
    if _has_phrase(reading.answer):
        return ReferenceAudit(ReferenceStatus.WORDS_ONLY, "words and mathematics mixed")
    if isinstance(reading.answer, Words) and " " in reading.answer.text:
        return ReferenceAudit(ReferenceStatus.WORDS_ONLY, "several words")
    return ReferenceAudit(ReferenceStatus.VERIFIABLE)


def _has_phrase(answer: Answer | None) -> bool:
    """Whether any part of the answer mixes words and mathematics."""
    if isinstance(answer, Sequence_):
        return any(map(_has_phrase, answer.items))
    if isinstance(answer, Conditions):
        return any(map(_has_phrase, answer.parts))
    if isinstance(answer, Assignment):
        return _has_phrase(answer.value)
    return isinstance(answer, Phrase)


def rewrites(reference: str) -> tuple[str, ...]:
    """Ways to write the same answer: in a box, between dollars, spaced, in other LaTeX styles."""
    spaced = re.sub(r"(?<=[\w)}]) ?([+=]) ?(?=[\w(\\{])", r" \1 ", reference)
    styled = reference.replace(r"\frac", r"\dfrac")
    if r"\left" not in styled and r"\{" not in styled:
        styled = styled.replace("(", r"\left(").replace(")", r"\right)")
    return (
        rf"\boxed{{{reference}}}",
        f"${reference}$",
        spaced,
        styled,
        rf"\displaystyle {spaced}.",
    )
