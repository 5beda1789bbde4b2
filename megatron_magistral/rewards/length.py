"""The soft length penalty: the hard cut is near (arXiv 2506.10910, section 2.2.3)."""

from __future__ import annotations


def length_reward(num_tokens: int, *, l_max: int, l_cache: int, penalty: float) -> float:
    """0 up to l_max - l_cache tokens, then linear down to -penalty at l_max, -penalty beyond."""
    excess = num_tokens - (l_max - l_cache)
    if excess <= 0:
        return 0.0
    return -penalty * min(excess / l_cache, 1.0)
