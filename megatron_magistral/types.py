"""The values that travel between roles. No behaviour beyond what their invariants need.

Life of a prompt group:

    Problem -> Group of G Completions -> Graded completions -> Batch of TrainSequences -> trained

All of them are frozen msgspec structs: hashable identity is by field value, and the wire format
(msgpack) checks types when it decodes.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """What a problem asks for, and so which verifier grades it."""

    MATHS = "maths"
    CODE = "code"


class CodeLanguage(StrEnum):
    PYTHON = "python"
    CPP = "cpp"


class TestCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One stdin/stdout test of a programming problem."""

    __test__ = False  # not a pytest class

    input: str
    output: str


class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task with what is needed to verify an answer to it.

    `reference` is the answer of a maths problem; `tests` and `code_language` belong to a
    programming problem. `language` is the ISO 639-1 code of the statement.
    """

    id: str
    kind: Kind
    category: str
    language: str
    statement: str
    reference: str = ""
    tests: tuple[TestCase, ...] = ()
    code_language: CodeLanguage | None = None


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One supervised example: a problem statement and the response to imitate.

    An example that is no problem to reason about, such as general instructions, has its whole
    `prompt`, which the response follows as it is; others have the run's template around the
    statement.
    """

    problem_id: str
    statement: str
    response: str
    prompt: str = ""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Span(msgspec.Struct, frozen=True):
    """Output tokens [start, end) were sampled by policy `version`."""

    version: int
    start: int
    end: int


class Completion(msgspec.Struct, frozen=True):
    """What a generator returned for one prompt: T output tokens and how each was sampled.

    `logprobs[t]` is the log-probability that the generator recorded when it sampled
    `output_ids[t]`; `spans` cover [0, T) without gap, versions never decrease.
    """

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    text: str


class GradeStatus(StrEnum):
    """How grading one completion ended. Only GRADED carries a reward that may be trained on."""

    GRADED = "graded"
    INFRASTRUCTURE = "infrastructure"


class Reward(msgspec.Struct, frozen=True):
    """The four axes of section 2.2; `total` is what the policy is paid."""

    format: float
    correctness: float
    language: float
    length: float
    passed_fraction: float = 0.0
    """Share of the verification that passed: 1 is a solved problem, whatever it is paid."""
    status: GradeStatus = GradeStatus.GRADED
    detail: str = ""

    @property
    def total(self) -> float:
        return self.format + self.correctness + self.language + self.length

    @property
    def is_solved(self) -> bool:
        return self.passed_fraction == 1.0


class Graded(msgspec.Struct, frozen=True):
    completion: Completion
    reward: Reward


class Group(msgspec.Struct, frozen=True):
    """The G graded completions of one admitted prompt. `ordinal` counts admissions, from 0."""

    ordinal: int
    problem: Problem
    members: tuple[Graded, ...]


class TrainSequence(msgspec.Struct, frozen=True):
    """One completion as a trainer sees it: S = num_prompt_tokens + T tokens.

    `advantage` is normalised over the minibatch and `weight` already holds the loss denominator of
    the whole minibatch, so that the loss is a plain sum over tokens, microbatches and ranks:

        loss = - sum_i weight_i * sum_t min(rho_it * A_i, clip(rho_it) * A_i)
    """

    tokens: tuple[int, ...]
    num_prompt_tokens: int
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    advantage: float
    weight: float

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


class Minibatch(msgspec.Struct, frozen=True):
    """All sequences of one optimizer step; `ranks[i]` is the data-parallel rank of sequence i."""

    sequences: tuple[TrainSequence, ...]
    ranks: tuple[int, ...]


class Progress(msgspec.Struct, frozen=True):
    """Where a stage goes on. What belongs to that step beside the trainers' state follows from it
    (see rollout/ledger.py)."""

    next_step: int = 0


class Batch(msgspec.Struct, frozen=True):
    """One step of the queue: n_batch completions in n_batch / n_minibatch minibatches.

    `eps_high` replaces the configured upper clipping bound, where entropy is controlled.
    """

    step: int
    minibatches: tuple[Minibatch, ...]
    ordinals: tuple[int, ...]
    eps_high: float | None = None
