"""Fake engines for the senders of weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rollout.fake_engine import FakeEngine


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    made = [FakeEngine(), FakeEngine()]
    yield made
    for engine in made:
        engine.close()
