"""What callers ask of the verifier service and what it answers. Pure data, JSON on the wire."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Verdict(StrEnum):
    """How a submission fared. INFRASTRUCTURE is no verdict: it says nothing about the program."""

    OK = "ok"
    WRONG_ANSWER = "wrong_answer"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    RUNTIME_ERROR = "runtime_error"
    COMPILE_ERROR = "compile_error"
    SECURITY = "security"
    INFRASTRUCTURE = "infrastructure"


class Language(StrEnum):
    PYTHON = "python"
    CPP = "cpp"


class CheckerKind(StrEnum):
    """How output is compared with what is expected."""

    TOKENS = "tokens"
    """Equal sequences of whitespace-separated tokens. Numbers are tokens: 1.0 is not 1."""
    LINES = "lines"
    """Equal lines, trailing blanks of a line and trailing empty lines ignored."""
    FLOATS = "floats"
    """Tokens; one expected as a decimal fraction may differ by the tolerance, an integer never."""
    EXACT = "exact"
    """Byte for byte."""
    PROGRAM = "program"
    """A program of the problem decides: output on stdin, input and expected at descriptors 3, 4;
    exit status 0 accepts, 1 rejects. It is first tried on an expected output; if it ends with
    neither status there, the answer is INFRASTRUCTURE whatever is submitted, else any other end of
    it later is a wrong answer. It has more time and memory than a submission."""
    INTERACTIVE = "interactive"
    """The problem's program talks with the submission over pipes: input and expected at 3 and 4,
    exit status and trial as for PROGRAM, tried on a submission that says nothing. A submission
    that talks it into a limit gets OUTPUT_LIMIT."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Program(_Strict):
    """A trusted author's program, run in the same jail as submissions."""

    language: Language
    source: str


class Checker(_Strict):
    """A kind with what it needs; a bare kind's name is accepted for it."""

    kind: CheckerKind = CheckerKind.TOKENS
    absolute_tolerance: float = Field(default=1e-6, ge=0)
    relative_tolerance: float = Field(default=1e-6, ge=0)
    program: Program | None = None

    @model_validator(mode="after")
    def _program_where_needed(self) -> Self:
        needs = self.kind in (CheckerKind.PROGRAM, CheckerKind.INTERACTIVE)
        if needs != (self.program is not None):
            raise ValueError(
                f"checker {self.kind.value!r}: program is {'missing' * needs or 'unused'}"
            )
        return self


def _checker_of(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def _valid_unicode(text: Any) -> Any:
    """A model may write half a surrogate pair, which no encoding can carry."""
    if not isinstance(text, str) or text.isascii():
        return text
    return text.encode("utf-8", "replace").decode()


CleanText = Annotated[str, BeforeValidator(_valid_unicode)]
"""Text that a model may have had a hand in; what cannot be encoded becomes `?`."""


class Limits(_Strict):
    """Per test, except the compiler's."""

    cpu_s: float = Field(default=4.0, gt=0, le=60)
    """By the process's CPU clock, all threads together."""
    memory_mib: int = Field(default=300, ge=16, le=1024)
    """Peak resident memory; memory that was never touched does not count."""
    output_mib: int = Field(default=16, ge=1, le=64)
    compile_cpu_s: float = Field(default=10.0, gt=0, le=60)


class Test(NamedTuple):
    """Standard input and expected output; for a function call, JSON arguments and JSON result."""

    input: str
    output: str


Test.__test__ = False  # type: ignore[attr-defined]  # not for pytest


class JudgeRequest(_Strict):
    """Judge one program.

    `num_tests` of the tests are drawn by a hash of `problem_id` and `group`, the same for every
    completion of a group. With `function_name` the program is Python that defines this function,
    or a class `Solution` with this method, called with the JSON array of a test's input.
    `test_ids` names the tests where the caller has drawn them already (`judge.draw.draw`).
    """

    language: Language
    source: Annotated[str, Field(max_length=1 << 20), BeforeValidator(_valid_unicode)]
    tests: list[Test] = Field(min_length=1)
    problem_id: CleanText
    group: CleanText
    num_tests: int = Field(default=20, ge=1)
    test_ids: list[int] | None = None
    stop_at_first_failure: bool = True
    checker: Annotated[Checker, BeforeValidator(_checker_of)] = Checker()
    function_name: str | None = None
    limits: Limits = Limits()
    deadline_s: float | None = Field(default=None, gt=0)
    """Longest wait for the whole answer; reached, it is INFRASTRUCTURE."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.function_name is not None:
            if self.language is not Language.PYTHON:
                raise ValueError("function_name: only Python functions can be called")
            if not self.function_name.isidentifier():
                raise ValueError(f"function_name: {self.function_name!r} is no identifier")
            if self.checker.kind not in (CheckerKind.TOKENS, CheckerKind.EXACT, CheckerKind.FLOATS):
                raise ValueError(f"function_name: results cannot be checked by {self.checker.kind}")
        if self.test_ids is not None and len(self.test_ids) != len(self.tests):
            raise ValueError(
                f"test_ids: {len(self.test_ids)} ids for {len(self.tests)} tests; must be as many"
            )
        return self


class TestResult(_Strict):
    """How one test went."""

    __test__ = False

    test_id: int
    """Index in the problem's whole list of tests."""
    verdict: Verdict
    cpu_ms: float
    wall_ms: float
    peak_memory_mib: float
    detail: str = ""


class CompileResult(_Strict):
    cpu_ms: float
    cached: bool
    messages: str = ""
    """What the compiler said, cut to a few kilobytes."""


class JudgeResult(_Strict):
    """The verdict is that of the first test that failed, or OK if all `num_tests` passed.

    It does not depend on `stop_at_first_failure`; `num_passed` does, since tests after the first
    failure are not run.
    """

    verdict: Verdict
    num_passed: int = 0
    num_tests: int = 0
    test_ids: list[int] = []
    per_test: list[TestResult] = []
    compile: CompileResult | None = None
    detail: str = ""
    num_reruns: int = 0
    """Tests run again alone because the machine was too busy to tell."""
    num_retries: int = 0
    """Attempts lost to faults of the machine."""

    @property
    def score(self) -> float:
        """1 if every drawn test passed, else 0: what the paper's reward asks."""
        return float(self.verdict is Verdict.OK)


class MathRequest(_Strict):
    """Does the response's final answer equal the reference?"""

    reference: CleanText
    response: CleanText


class MathAnswer(_Strict):
    """`verdict` is the value of a `mathcheck.MathVerdict`."""

    verdict: str
    reason: str


def infrastructure(detail: str, **fields: Any) -> JudgeResult:
    """The answer when nobody could judge."""
    return JudgeResult(verdict=Verdict.INFRASTRUCTURE, detail=detail, **fields)
