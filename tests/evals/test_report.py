from megatron_magistral.evals.report import EvalReport, summarise
from megatron_magistral.types import GradeStatus
from tests.fakes import graded_of, problem_of

SOLVED = graded_of(0.9, num_tokens=10, format=0.1, language=0.1, passed_fraction=1.0)
WRONG = graded_of(0.0, num_tokens=4, format=0.1)
MALFORMED = graded_of(0.0, num_tokens=6)
MASKED = graded_of(0.0, num_tokens=99, status=GradeStatus.INFRASTRUCTURE)

SAMPLES = [
    (problem_of(id="a", category="maths/numeric", language="en"), [SOLVED, WRONG]),
    (problem_of(id="b", category="maths/numeric", language="fr"), [MALFORMED, WRONG]),
    (problem_of(id="c", category="code/cpp", language="en"), [SOLVED, MASKED]),
]


def report() -> EvalReport:
    return summarise(SAMPLES, {"num_samples": 2, "temperature": 0.7})


def test_pass_at_1_by_category_and_language():
    result = report()
    assert result.overall.pass_at_1 == (0.5 + 0.0 + 1.0) / 3
    assert result.by_category["maths/numeric"].pass_at_1 == 0.25
    assert result.by_category["code/cpp"].pass_at_1 == 1.0
    assert result.by_language["fr"].pass_at_1 == 0.0


def test_a_masked_sample_is_counted_and_counts_nowhere_else():
    result = report()
    assert result.num_masked == 1
    assert result.mean_num_tokens == (10 + 4 + 6 + 4 + 10) / 5


def test_rates_are_over_graded_and_language_over_well_formed_samples():
    result = report()
    assert result.format_rate == 4 / 5
    assert result.language_rate == 2 / 4


def test_a_category_without_any_grade_has_no_score_rather_than_zero():
    result = summarise([(problem_of(), [MASKED, MASKED])], {})
    assert result.overall.num_problems == 0
    assert result.overall.pass_at_1 is None
    assert result.mean_reward is None


def test_a_report_survives_saving(tmp_path):
    path = tmp_path / "report.json"
    report().save(path)
    assert EvalReport.load(path) == report()
