import io
import json

import pytest
from rich.console import Console

from megatron_magistral.display import MetricsReader, RunView, final_table
from megatron_magistral.evals.report import summarise
from tests.fakes import graded_of, problem_of

PROTOCOL = {"num_samples": 1, "temperature": 0.7}
ROW = {"stage": "rl", "step": 3, "time": 1000.0, "reward_mean": 0.5, "queue_sequences": 16.0}


def report(solved: bool):
    graded = graded_of(0.9 * solved, format=0.1, passed_fraction=float(solved))
    return summarise([(problem_of(), [graded])], PROTOCOL)


def plain_console() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=False, width=300), stream


def test_a_half_written_line_waits_for_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert list(reader.new_rows()) == []
    path.write_text('{"step": 0}\n{"st')
    assert list(reader.new_rows()) == [{"step": 0}]
    with path.open("a") as file:
        file.write('ep": 1}\n')
    assert list(reader.new_rows()) == [{"step": 1}]


def test_a_file_that_is_replaced_by_a_shorter_one_gives_the_new_rows_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "time": 10.0 + step}) + "\n" for step in range(4)]
    path.write_text("".join(lines[:3]))
    reader = MetricsReader(path, since=10.5)  # as a resumed run begins to watch
    assert [row["step"] for row in reader.new_rows()] == [1, 2]
    draft = tmp_path / "draft"
    draft.write_text("".join(lines[:2]))
    draft.replace(path)
    assert list(reader.new_rows()) == []
    with path.open("a") as file:
        file.write(json.dumps({"step": 2, "time": 20.0}) + "\n")
    assert list(reader.new_rows()) == [{"step": 2, "time": 20.0}]


def test_without_a_terminal_each_step_is_one_plain_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    console, stream = plain_console()
    with RunView(console, path, {"rl": 10}, tmp_path / "phase.txt") as view:
        view.refresh()
        view.refresh()
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("rl 4/10  reward 0.500")
    assert "entropy –" in line  # not measured in this row
    assert "\x1b" not in line


def test_a_phase_is_told_once_and_replaces_the_last_step(tmp_path):
    path, phase = tmp_path / "metrics.jsonl", tmp_path / "phase.txt"
    path.write_text(json.dumps(ROW) + "\n")
    console, stream = plain_console()
    with RunView(console, path, {"rl": 10}, phase) as view:
        view.refresh()
        phase.write_text("evaluating after RL")
        view.refresh()
        view.refresh()
        with console.capture() as captured:
            console.print(view._panel())
    assert stream.getvalue().count("evaluating after RL") == 1
    assert "evaluating after RL" in captured.get()
    assert "rl 4/10" not in captured.get()


def test_in_a_terminal_the_panel_names_stage_step_and_time_left(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [ROW, ROW | {"step": 4, "time": 1010.0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    view = RunView(console, path, {"rl": 10}, tmp_path / "phase.txt")
    view.refresh()
    with console.capture() as captured:
        console.print(view._panel())
    assert "rl 5/10" in captured.get()
    assert "stage ends in" in captured.get()


@pytest.mark.parametrize(
    "expected",
    ["all 1 0.000 1.000 +1.000", "maths/numeric 1 0.000 1.000 +1.000", "mean reward 0.100 1.000"],
)
def test_the_final_table_compares_before_and_after(expected):
    console, stream = plain_console()
    console.print(final_table(report(solved=False), report(solved=True)))
    cells = " ".join(stream.getvalue().replace("│", " ").split())
    assert expected in cells
