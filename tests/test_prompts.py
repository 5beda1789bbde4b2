import pytest

from megatron_magistral.prompts import load_template, render_prompt


def test_the_shipped_prompt_gives_its_instructions_in_the_order_of_the_paper():
    template = load_template()
    order = [
        "inner monologue",
        "final answer",
        "self-contained summary",
        "Markdown and LaTeX",
        "language in which the task is posed",
        "<think>",
        "casual",
        "</think>",
        r"\boxed{}",
        "code block",
        "Problem:",
        "{problem}",
    ]
    positions = [template.index(phrase) for phrase in order]
    assert positions == sorted(positions)
    assert template.count("{problem}") == 1


def test_the_statement_follows_problem_and_keeps_its_braces():
    statement = r"Find {x} in \frac{1}{2} {problem} {}."
    prompt = render_prompt(statement, load_template())
    assert prompt.endswith(f"Problem:\n\n{statement}\n")
    assert prompt.count(statement) == 1


def test_a_prompt_file_replaces_the_shipped_prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Lös {problem} bitte", encoding="utf-8")
    assert render_prompt("1+1", load_template(path)) == "Lös 1+1 bitte"


@pytest.mark.parametrize(("text", "count"), [("Solve it.", 0), ("{problem} {problem}", 2)])
def test_a_prompt_file_must_name_the_problem_exactly_once(tmp_path, text, count):
    path = tmp_path / "prompt.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"prompt_file = .*exactly once, found {count}"):
        load_template(path)


def test_a_missing_prompt_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        load_template(tmp_path / "absent.txt")
