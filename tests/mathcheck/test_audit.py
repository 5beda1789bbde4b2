import json

import pytest
from typer.testing import CliRunner

from verifier_sandbox.mathcheck.audit import BadRow, app, read_rows
from verifier_sandbox.mathcheck.references import ReferenceStatus, audit_reference


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
