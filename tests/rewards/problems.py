"""Problems and responses for the tests of the rewards."""

from megatron_magistral.types import CodeLanguage, Kind, Problem

MATHS = Problem(
    id="m", kind=Kind.MATHS, category="sum", language="en", statement="Add 1 and 2.", reference="3"
)
CODE = Problem(
    id="c",
    kind=Kind.CODE,
    category="echo",
    language="en",
    statement="Print the input.",
    code_language=CodeLanguage.PYTHON,
)


def response(answer: str, thoughts: str = "Let me think.") -> str:
    return f"<think>{thoughts}</think>{answer}"
