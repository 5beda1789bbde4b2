"""The labelled pairs: accuracy has a floor, and some categories allow no false positive."""

import json
from pathlib import Path

import pytest

from benchmarks.maths import MIN_ACCURACY, NO_FALSE_POSITIVES
from verifier_sandbox.mathcheck import MathVerdict, check

PAIRS_FILE = Path(__file__).parents[1] / "data" / "math_pairs.jsonl"
PAIRS = [json.loads(line) for line in PAIRS_FILE.read_text(encoding="utf-8").splitlines()]


def is_correct(reference: str, prediction: str) -> bool:
    return check(reference, prediction).verdict is MathVerdict.CORRECT


@pytest.fixture(scope="module")
def verdicts():
    return [is_correct(pair["gold"], pair["pred"]) for pair in PAIRS]


def test_accuracy_is_at_its_floor_or_above(verdicts):
    right = sum(verdict == pair["match"] for verdict, pair in zip(verdicts, PAIRS, strict=True))
    assert right / len(PAIRS) >= MIN_ACCURACY


@pytest.mark.parametrize("category", sorted(NO_FALSE_POSITIVES))
def test_a_strict_category_has_no_false_positive(verdicts, category):
    false_positives = [
        (pair["gold"][:80], pair["pred"][:80])
        for verdict, pair in zip(verdicts, PAIRS, strict=True)
        if pair["category"] == category and verdict and not pair["match"]
    ]
    assert false_positives == []


def test_every_reference_of_a_matching_pair_equals_itself():
    assert all(is_correct(pair["gold"], pair["gold"]) for pair in PAIRS)


def test_a_pair_in_a_box_gets_the_verdict_of_the_bare_pair(verdicts):
    different = [
        pair["pred"][:80]
        for verdict, pair in zip(verdicts, PAIRS, strict=True)
        if "boxed" not in pair["pred"]
        and "fbox" not in pair["pred"]
        and pair["pred"].count("{") == pair["pred"].count("}")
        and verdict != is_correct(pair["gold"], rf"Thus \boxed{{{pair['pred']}}}.")
    ]
    assert different == []
