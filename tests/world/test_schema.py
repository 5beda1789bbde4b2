"""Reading problems and traces: good rows come back equal, bad rows are set aside with a reason."""

import json

import msgspec
import pytest

from megatron_magistral.data.schema import read_problems, read_traces, write_rows
from megatron_magistral.types import CodeLanguage, Kind, Problem, TestCase, Trace

MATHS = Problem(
    id="m1",
    kind=Kind.MATHS,
    category="maths/numeric",
    language="en",
    statement="What is $1+1$?",
    reference="2",
)
CODE = Problem(
    id="c1",
    kind=Kind.CODE,
    category="code/cpp",
    language="zh",
    statement="写一个程序\nin two lines",
    tests=(TestCase(input="1\n", output="2\n"),),
    code_language=CodeLanguage.CPP,
)


def line_of(problem: Problem, **changes: object) -> str:
    return json.dumps(msgspec.to_builtins(problem) | changes, ensure_ascii=False)


def test_what_is_written_is_read_back_equal(tmp_path):
    problems, traces = tmp_path / "p.jsonl", tmp_path / "t.jsonl"
    trace = Trace(problem_id="m1", statement=MATHS.statement, response="<think>…</think>\n2")
    write_rows(problems, [MATHS, CODE])
    write_rows(traces, [trace, trace])

    assert read_problems(problems).rows == (MATHS, CODE)
    assert read_traces(traces).rows == (trace, trace)
    assert not read_problems(problems).bad and not read_traces(traces).bad


@pytest.mark.parametrize(
    ("bad_line", "reason"),
    [
        ('{"id": "m1", ', "truncated"),
        ("[1, 2]", "Expected `object`"),
        (line_of(MATHS, kind="poetry"), "kind"),
        (line_of(MATHS, surprise=1), "surprise"),
        (line_of(MATHS, statement=7), "statement"),
        (line_of(MATHS, statement="  "), "statement is empty"),
        (line_of(MATHS, id=""), "id is empty"),
        (line_of(MATHS, language="English"), "'English'"),
        (line_of(MATHS, reference=""), "non-empty reference"),
        (line_of(CODE, tests=[]), "at least one test"),
        (line_of(CODE, code_language=None), "code_language"),
        (line_of(CODE, tests=[{"input": "1"}]), "output"),
    ],
)
def test_a_bad_row_is_set_aside_with_its_file_line_and_reason(tmp_path, bad_line, reason):
    path = tmp_path / "problems.jsonl"
    path.write_text(f"{line_of(MATHS)}\n\n{bad_line}\n{line_of(CODE)}\n", encoding="utf-8")

    result = read_problems(path)

    assert result.rows == (MATHS, CODE)
    (bad,) = result.bad
    assert (bad.path, bad.line) == (path, 3)
    assert reason in bad.reason
    assert str(bad).startswith(f"{path}:3: ")
    assert result.summary() == "2 rows read, 1 set aside"


def test_bytes_that_are_not_utf8_are_a_bad_row(tmp_path):
    path = tmp_path / "problems.jsonl"
    row = line_of(MATHS).encode().replace(b"What", b"Wh\xff\xfet")
    path.write_bytes(row + b"\n" + line_of(CODE).encode() + b"\n")

    result = read_problems(path)

    assert result.rows == (CODE,)
    assert [bad.line for bad in result.bad] == [1]


def test_a_repeated_id_is_a_bad_row_that_names_the_first_line(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(f"{line_of(MATHS)}\n{line_of(CODE)}\n{line_of(MATHS)}\n", encoding="utf-8")

    result = read_problems(path)

    assert result.rows == (MATHS, CODE)
    assert result.bad[0].line == 3 and "line 1" in result.bad[0].reason


def test_a_trace_without_a_response_is_a_bad_row(tmp_path):
    path = tmp_path / "traces.jsonl"
    path.write_text('{"problem_id": "m1", "statement": "s", "response": " "}\n')

    result = read_traces(path)

    assert not result.rows and "response is empty" in result.bad[0].reason


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.jsonl"):
        read_problems(tmp_path / "absent.jsonl")
