"""The battery: programs, legal and hostile, with the verdict that each must get.

`cpp.txt` and `python.txt` are the data; `selftest` and the tests run them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifier_sandbox.protocol import JudgeRequest, Language, Limits, Test, Verdict

_HEADER = re.compile(r"^### (\w+) (\w+): (.+)$", re.MULTILINE)
# A refused system call raises in Python: the program fails where it tried.
_ALIASES = {"blocked": Verdict.RUNTIME_ERROR}
_FILES = {Language.CPP: "cpp.txt", Language.PYTHON: "python.txt"}


@dataclass(frozen=True)
class Case:
    """One program, its test, and what must come of it."""

    name: str
    language: Language
    source: str
    verdict: Verdict
    why: str
    input: str
    expected: str
    limits: Limits

    @property
    def id(self) -> str:
        return f"{self.language.value}-{self.name}"

    def request(self) -> JudgeRequest:
        return JudgeRequest(
            language=self.language,
            source=self.source,
            tests=[Test(self.input, self.expected)],
            problem_id=f"battery/{self.id}",
            group="selftest",
            limits=self.limits,
        )


def cases(language: Language) -> list[Case]:
    """Every program of the battery in this language."""
    text = (Path(__file__).parent / _FILES[language]).read_text(encoding="utf-8")
    return list(_parse(text, language))


def _parse(text: str, language: Language) -> Iterator[Case]:
    headers = list(_HEADER.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    for header, end in zip(headers, ends, strict=True):
        name, verdict, why = header.groups()
        source = text[header.end() + 1 : end].rstrip() + "\n"
        options: dict[str, Any] = {}
        if source.startswith("#! "):
            line, _, source = source.partition("\n")
            options = json.loads(line.removeprefix("#! "))
        yield Case(
            name=name,
            language=language,
            source=source,
            verdict=_ALIASES.get(verdict) or Verdict(verdict),
            why=why,
            input=_text(options.get("input", "")),
            expected=_text(options.get("expected", "safe\n")),
            limits=Limits(**options.get("limits", {})),
        )


def _text(value: str | dict[str, Any]) -> str:
    if isinstance(value, str):
        return value
    piece, times = value["repeat"]
    return piece * times
