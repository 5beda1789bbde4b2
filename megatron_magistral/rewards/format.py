r"""The format gate: decides, without grading, whether a response earns anything (section 2.2.1).

    <think>thoughts</think>answer

The answer holds `\boxed{...}` for maths, a fenced code block with a language tag for code. What
fails the gate gets reward 0 and is not graded; what passes is split here, once, for the verifiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_magistral.rewards.markdown import split_fences
from megatron_magistral.types import CodeLanguage, Kind, Problem
from verifier_sandbox.mathcheck import last_boxed

THINK_START = "<think>"
THINK_END = "</think>"
BOXED = r"\boxed"  # the maths check also reads \fbox, which no prompt asks for

_CODE_LANGUAGES = {
    "python": CodeLanguage.PYTHON,
    "python3": CodeLanguage.PYTHON,
    "py": CodeLanguage.PYTHON,
    "cpp": CodeLanguage.CPP,
    "c++": CodeLanguage.CPP,
    "cc": CodeLanguage.CPP,
    "cxx": CodeLanguage.CPP,
}


class GateStatus(StrEnum):
    """Outcome of the gate, in the order in which it is checked."""

    PASSED = "passed"
    NO_THINK_AT_START = "no_think_at_start"
    THINK_COUNT = "think_count"
    """Not exactly one <think> and exactly one </think>."""
    NO_BOXED = "no_boxed"
    r"""Maths: no balanced, non-empty \boxed{...} in the answer."""
    NO_CODE_BLOCK = "no_code_block"
    """Code: no closed fenced block in the answer."""
    NO_LANGUAGE_TAG = "no_language_tag"
    """Code: fenced blocks, but none names its language."""


@dataclass(frozen=True)
class GateResult:
    """What the gate saw; every text is empty where the gate failed before reaching it.

    `submission` is what a verifier grades: the content of the last boxed answer, or the source of
    the first fenced block, whose language tag is `tag`.
    """

    status: GateStatus
    thoughts: str = ""
    answer: str = ""
    submission: str = ""
    tag: str = ""

    @property
    def passed(self) -> bool:
        return self.status is GateStatus.PASSED


def gate(problem: Problem, text: str) -> GateResult:
    """Checks the format of response `text` to `problem`."""
    if not text.startswith(THINK_START):
        return GateResult(GateStatus.NO_THINK_AT_START)
    if text.count(THINK_START) != 1 or text.count(THINK_END) != 1:
        return GateResult(GateStatus.THINK_COUNT)
    thoughts, answer = text.removeprefix(THINK_START).split(THINK_END)
    if problem.kind is Kind.MATHS:
        return _maths_gate(thoughts, answer)
    return _code_gate(thoughts, answer)


def _maths_gate(thoughts: str, answer: str) -> GateResult:
    submission = (last_boxed(answer) or "").strip() if BOXED in answer else ""
    status = GateStatus.PASSED if submission else GateStatus.NO_BOXED
    return GateResult(status, thoughts, answer, submission)


def _code_gate(thoughts: str, answer: str) -> GateResult:
    blocks, _ = split_fences(answer)
    if not blocks:
        return GateResult(GateStatus.NO_CODE_BLOCK, thoughts, answer)
    if not any(block.tag for block in blocks):
        return GateResult(GateStatus.NO_LANGUAGE_TAG, thoughts, answer)
    return GateResult(GateStatus.PASSED, thoughts, answer, blocks[0].source, blocks[0].tag)


def submission_language(problem: Problem, result: GateResult) -> CodeLanguage | None:
    """What to run the submission as: the language the problem asks for, else the one of its tag.

    A problem that asks for C++ is not solved in Python, whatever the tag says. None if neither
    names a language that the judge knows: then the submission is wrong.
    """
    return problem.code_language or _CODE_LANGUAGES.get(result.tag.lower())
