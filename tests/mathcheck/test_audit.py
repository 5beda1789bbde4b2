import json

import pytest
from typer.testing import CliRunner

from benchmarks.maths import read_pairs
from verifier_sandbox.mathcheck.audit import app
from verifier_sandbox.mathcheck.references import ReferenceStatus, audit_reference
from verifier_sandbox.mathcheck.rows import BadRow, read_rows


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def invoke(tmp_path, command, rows, *options):
    report = tmp_path / "report.json"
    file = write_rows(tmp_path / "rows.jsonl", rows)
    result = CliRunner().invoke(app, [command, file, "--report", str(report), *options])
    return result, json.loads(report.read_text()) if report.exists() else None


def test_the_audit_of_pairs_counts_errors_against_the_labels(tmp_path):
    rows = [
        {"gold": "1/2", "pred": "0.5", "match": True, "category": "fraction"},
        {"gold": "1/2", "pred": "0.6", "match": True, "category": "fraction"},
        {"gold": "7", "pred": "7", "match": False},
        {"gold": "7", "pred": "8"},
    ]
    result, report = invoke(tmp_path, "maths", rows, "--no-second")
    assert result.exit_code == 0
    assert report["summary"]["labelled"] == 3
    assert report["summary"]["false_negatives"] == 1
    assert report["summary"]["false_positives"] == 1
    assert [error["pred"] for error in report["errors"]] == ["0.6", "7"]
    assert len(report["slowest"]) == 4


def test_a_row_without_a_prediction_is_named(tmp_path):
    result, report = invoke(tmp_path, "maths", [{"gold": "7"}], "--no-second")
    assert result.exit_code != 0
    assert "row 1: 'pred' must be a string" in result.output
    assert report is None


def test_a_line_that_is_not_json_is_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"gold": "1", "pred": "1"}\n{oops\n')
    with pytest.raises(BadRow, match=":2: not JSON"):
        read_rows(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no rows"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"gold": "1", "pred": "\\ud800"}', "half of a surrogate pair"),
        (b'{"gold": "1", "pred": "1", "match": "yes"}', "'match' must be true or false"),
    ],
)
def test_a_file_that_cannot_be_judged_is_one_clear_error(tmp_path, content, message):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    result = CliRunner().invoke(app, ["maths", str(file), "--report", str(tmp_path / "r.json")])
    assert result.exit_code == 2
    assert message in result.output
    with pytest.raises(BadRow):
        read_pairs(file)


def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [{"gold": "1", "pred": "1"}])
    result = CliRunner().invoke(app, ["maths", file, "--report", str(tmp_path / "no" / "r.json")])
    assert result.exit_code == 2
    assert "--report" in result.output


def test_an_interpreter_that_does_not_exist_is_refused(tmp_path):
    rows = [{"gold": "1", "pred": "1"}]
    result, report = invoke(tmp_path, "maths", rows, "--math-verify-python", "/no/such/python")
    assert result.exit_code == 2
    assert report is None


def test_brackets_in_a_category_are_no_markup(tmp_path):
    rows = [{"gold": 5, "pred": "6[/red]", "category": "[/x]", "match": False}]
    result, report = invoke(tmp_path, "maths", rows, "--no-second")
    assert result.exit_code == 0
    assert "[/x]" in result.output
    assert report["summary"]["false_positives"] == 0


def test_the_audit_of_references_names_what_cannot_be_verified(tmp_path):
    rows = [{"answer": r"\frac{1}{2}"}, {"answer": r"\foo{3}"}, {"answer": 7}]
    result, report = invoke(tmp_path, "reference", rows)
    assert result.exit_code == 0
    assert report["summary"] == {
        "verifiable": 2,
        "words_only": 0,
        "unreadable": 1,
        "too_big": 0,
        "unstable": 0,
    }
    assert [entry["row"] for entry in report["unfit"]] == [2]


@pytest.mark.parametrize(
    ("reference", "status"),
    [
        ("42", ReferenceStatus.VERIFIABLE),
        (r"x = \frac{-1 \pm \sqrt{5}}{2}", ReferenceStatus.VERIFIABLE),
        (r"(-\infty, 2) \cup [3, 4)", ReferenceStatus.VERIFIABLE),
        (r"\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix}", ReferenceStatus.VERIFIABLE),
        ("B", ReferenceStatus.VERIFIABLE),
        (r"\text{even}", ReferenceStatus.VERIFIABLE),
        (r"\text{all primes below ten}", ReferenceStatus.WORDS_ONLY),
        (r"5 \text{ if } x > 0 \text{ and } 6 \text{ otherwise}", ReferenceStatus.WORDS_ONLY),
        (r"\frac{1}{", ReferenceStatus.UNREADABLE),
        ("", ReferenceStatus.UNREADABLE),
        ("7" * 5000, ReferenceStatus.TOO_BIG),
    ],
)
def test_the_status_of_a_reference(reference, status):
    assert audit_reference(reference).status is status
