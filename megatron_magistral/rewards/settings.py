"""The numbers of the reward (arXiv 2506.10910, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RewardSettings:
    """The axes' sizes and the two lengths of the soft penalty; the sizes are the paper's.

    Raises ValueError if `l_cache` is not in (0, l_max) or a size is negative.
    """

    l_max: int
    """Longest completion in tokens."""
    l_cache: int
    """Tokens before `l_max` over which the penalty grows from 0 to `length_penalty`."""
    format: float = 0.1
    correctness: float = 0.9
    language: float = 0.1
    length_penalty: float = 0.1
    proportional_code: bool = False
    """Pay programs by the share of tests they pass (section 7.4.1), not all or nothing."""

    def __post_init__(self) -> None:
        if not 0 < self.l_cache < self.l_max:
            raise ValueError(f"l_cache = {self.l_cache}: must be > 0 and < l_max = {self.l_max}")
        for name in ("format", "correctness", "language", "length_penalty"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be >= 0")
