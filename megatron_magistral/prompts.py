"""The one system prompt for maths and code (arXiv 2506.10910, figure 2).

RL is sensitive to its words: the invitation to be casual and long raises entropy. A run's
`prompt_file` replaces the template.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from megatron_magistral.types import Trace

PLACEHOLDER = "{problem}"


def load_template(prompt_file: Path | None = None) -> str:
    """The template in `prompt_file`, or the shipped one.

    Raises ValueError if it does not hold `{problem}` exactly once, OSError if it cannot be read.
    """
    if prompt_file is None:
        shipped = resources.files("megatron_magistral") / "system_prompt.txt"
        return shipped.read_text(encoding="utf-8")
    template = prompt_file.read_text(encoding="utf-8")
    count = template.count(PLACEHOLDER)
    if count != 1:
        raise ValueError(
            f"prompt_file = {prompt_file}: must contain {PLACEHOLDER} exactly once, found {count}"
        )
    return template


def render_prompt(statement: str, template: str) -> str:
    """The text that the policy continues. Braces in either part mean nothing."""
    before, _, after = template.partition(PLACEHOLDER)
    return before + statement + after


def trace_prompt(trace: Trace, template: str) -> str:
    """What the response of a trace follows: its own prompt, or the template with its statement."""
    return trace.prompt or render_prompt(trace.statement, template)
