"""Which of a problem's tests a submission meets."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from verifier_sandbox.protocol import JudgeRequest, Test


def draw_ids(problem_id: str, group: str, num_available: int, num_wanted: int) -> list[int]:
    """`num_wanted` of `range(num_available)`, ascending, by hash of the problem and the group.

    Every completion of a group meets the same tests, on every node and after every restart, and
    another group meets others (arXiv 2506.10910, section 2.2.2).
    """
    if num_available <= num_wanted:
        return list(range(num_available))
    parts = (problem_id.encode(), group.encode())
    # Lengths first: ("a", "bc") must not equal ("ab", "c").
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    seed = int.from_bytes(hashlib.sha256(framed).digest(), "big")
    return sorted(random.Random(seed).sample(range(num_available), num_wanted))


def draw(request: JudgeRequest) -> tuple[list[int], Sequence[Test]]:
    """The ids and the tests that this request is judged by."""
    if request.test_ids is not None:
        return request.test_ids, request.tests
    ids = draw_ids(request.problem_id, request.group, len(request.tests), request.num_tests)
    return ids, [request.tests[i] for i in ids]
