"""Our own cases, several per category and policy. Unlike the collected pairs all must pass."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from verifier_sandbox.mathcheck import MathVerdict, check

CASES = defaultdict(list)
for line in (Path(__file__).parent / "cases.jsonl").read_text(encoding="utf-8").splitlines():
    case = json.loads(line)
    CASES[case["category"]].append(case)


@pytest.mark.parametrize("category", sorted(CASES))
def test_all_cases_of_a_category_are_judged_right(category):
    wrong = [
        (case["gold"], case["pred"], result)
        for case in CASES[category]
        if ((result := check(case["gold"], case["pred"])).verdict is MathVerdict.CORRECT)
        != case["match"]
    ]
    assert wrong == []
