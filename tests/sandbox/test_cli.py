"""The command line: what it reads, and how it says no."""

import pytest
from typer.testing import CliRunner

from verifier_sandbox import cli
from verifier_sandbox.protocol import JudgeResult, Test, Verdict

PASSED, FAILED, BAD_INPUT = 0, 1, 2


@pytest.fixture
def files(tmp_path):
    """A directory of tests and a submission that passes them."""
    (tmp_path / "1.in").write_bytes(b"3 4\r\n")
    (tmp_path / "1.out").write_bytes(b"7\r\n")
    (tmp_path / "sum.py").write_bytes(b"a, b = map(int, input().split())\r\nprint(a + b)\r\n")
    return tmp_path


def sandbox(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--memory-mib", "5"], "--memory-mib 5: input should be greater than or equal to 16"),
        (["--cpu-s", "0"], "--cpu-s 0.0: input should be greater than 0"),
        (["--num-slots", "0"], "--num-slots 0: must be at least 1"),
        (["--checker", "program"], "checker 'program': program is missing (see --checker-file)"),
        (["--checker", "interactive"], "program is missing (see --checker-file)"),
        (["--checker-file", "sum.py"], "checker 'tokens': program is unused (see --checker-file)"),
        (["--checker", "program", "--checker-file", "no.py"], "no.py: No such file or directory"),
        (["--checker", "program", "--checker-file", "1.in"], "1.in: must end in one of .py"),
        (["--tests", "no"], "no: is no directory"),
        (["--tests", "sum.py"], "sum.py: is no directory"),
    ],
)
def test_bad_options_are_one_clear_line(files, monkeypatch, options, complaint):
    monkeypatch.chdir(files)
    answer = sandbox("run", "sum.py", "--tests", ".", *options)
    assert answer.exit_code == BAD_INPUT
    assert answer.stderr.startswith("error: ")
    assert complaint in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("sum.py", b"print('\xe9')", "sum.py: is no UTF-8 text at byte 7"),
        ("sum.py", None, "sum.py: No such file or directory"),
        ("1.in", b"\xff\xfe", "1.in: is no UTF-8 text at byte 0"),
        ("1.out", b"\xff", "1.out: is no UTF-8 text at byte 0"),
        ("1.out", None, "1.in: there is no 1.out or 1.ans"),
        ("1.in", None, "holds no *.in files"),
        ("sum.py", b"#" * (1 << 20) + b"#", "source: string should have at most 1048576"),
    ],
)
def test_bad_files_are_one_clear_line(files, name, content, complaint):
    if content is None:
        (files / name).unlink()
    else:
        (files / name).write_bytes(content)
    answer = sandbox("run", files / "sum.py", "--tests", files)
    assert answer.exit_code == BAD_INPUT
    assert complaint in answer.stderr
    assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [["serve", "--num-slots", "0"], ["serve", "--num-maths-workers", "0"],
     ["serve", "--max-queue", "-1"], ["selftest", "--num-slots", "0"]],
)  # fmt: skip
def test_numbers_that_make_no_service_are_refused(options):
    answer = sandbox(*options)
    assert answer.exit_code == BAD_INPUT
    assert answer.stderr.startswith(f"error: {options[1]} {options[2]}: must be at least ")


def test_files_are_judged_as_they_are_with_their_line_ends(files, monkeypatch):
    requests = []

    def judge_all(given, num_slots):
        requests.extend(given)
        return [JudgeResult(verdict=Verdict.OK)], "unused"

    monkeypatch.setattr(cli, "_judge_all", judge_all)
    assert sandbox("run", files / "sum.py", "--tests", files).exit_code == PASSED
    assert requests[0].tests == [Test("3 4\r\n", "7\r\n")]
    assert requests[0].source.endswith("print(a + b)\r\n")


@pytest.mark.sandbox
@pytest.mark.parametrize(("status", "exit_code"), [(0, PASSED), (1, FAILED)])
def test_a_checker_program_can_be_given(files, status, exit_code):
    (files / "checker.cpp").write_text(f"int main() {{ return {status}; }}")
    options = ("--checker", "program", "--checker-file", files / "checker.cpp")
    answer = sandbox("run", files / "sum.py", "--tests", files, *options)
    assert answer.exit_code == exit_code, answer.output


@pytest.mark.sandbox
def test_a_checker_program_that_does_not_compile_is_bad_input(files):
    (files / "checker.cpp").write_text("int main() { return x; }")
    options = ("--checker", "program", "--checker-file", files / "checker.cpp")
    answer = sandbox("run", files / "sum.py", "--tests", files, *options)
    assert answer.exit_code == BAD_INPUT
    assert "checker program does not compile" in answer.stderr
    assert answer.stderr.count("\n") == 1
