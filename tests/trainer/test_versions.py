"""Which versions of Megatron-core are taken, and what is said of them."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_magistral.trainer import megatron_backend
from megatron_magistral.trainer.megatron_backend import BackendError, find_backend
from megatron_magistral.trainer.versions import FIRST_UNTESTED, OLDEST, Support, megatron_support


@pytest.mark.parametrize(
    ("version", "support"),
    [
        ("0.15.9", Support.TOO_OLD),
        ("0.16.0", Support.TOO_OLD),
        ("0.16.1", Support.TESTED),
        ("0.19.2", Support.TESTED),
        ("0.20.0rc1", Support.UNTESTED),
        ("0.20", Support.UNTESTED),
        ("1.0", Support.UNTESTED),
    ],
)
def test_versions_between_two_bounds_are_tested(version: str, support: Support) -> None:
    assert megatron_support(version) is support


def _pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(megatron_backend.metadata, "version", lambda package: version)


def test_an_untested_version_is_used_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _pretend(monkeypatch, "0.20.1")
    with caplog.at_level(logging.INFO):
        find_backend().announce()
    (warning,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert warning == "megatron-core 0.20.1: tested below 0.20"


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend(monkeypatch, "0.15.0")
    with pytest.raises(BackendError, match=r"megatron-core 0\.15\.0: install at least 0\.16\.1"):
        find_backend()


def test_what_was_found_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        find_backend().announce()
    (line,) = (record.getMessage() for record in caplog.records)
    for part in ("megatron-core", "layers by", "Adam by", "torch"):
        assert part in line


def test_the_package_asks_for_the_same_versions() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (asked,) = (
        Requirement(text)
        for text in project["optional-dependencies"]["trainer"]
        if text.startswith("megatron-core")
    )
    assert asked.specifier == Requirement(f"x>={OLDEST},<{FIRST_UNTESTED}").specifier
