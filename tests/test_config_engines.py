"""What is done about engines that fail: each key reaches what it is about, defaults are theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_magistral.config import GeneratorConfig
from megatron_magistral.config_engines import ChecksConfig, RecoveryConfig
from megatron_magistral.config_file import ConfigError, load
from megatron_magistral.launcher import generator_restarts
from megatron_magistral.rollout.engine_pool import PoolSettings
from megatron_magistral.rollout.role import pool_settings
from megatron_magistral.trainer.publish import PublishSettings

TINY = Path(__file__).parent.parent / "configs" / "tiny.yaml"
KEYS = [
    *(f"generator.checks.{key}" for key in ChecksConfig.model_fields),
    *(f"generator.recovery.{key}" for key in RecoveryConfig.model_fields),
]


def settings(*overrides: str) -> tuple[Any, ...]:
    """Everything that is made of the two sections."""
    config = load(TINY, overrides)
    return (
        PublishSettings.of(config.generator, "host"),
        pool_settings(config),
        generator_restarts(config),
    )


def test_the_defaults_are_those_of_the_parts() -> None:
    assert PublishSettings.of(GeneratorConfig(), "host") == PublishSettings(host="host")
    assert pool_settings(load(TINY)) == PoolSettings()


@pytest.mark.parametrize("key", KEYS)
def test_every_key_reaches_a_part(key: str) -> None:
    _, section, name = key.split(".")
    default = getattr(getattr(GeneratorConfig(), section), name)
    assert settings(f"{key}={default}") == settings()
    assert settings(f"{key}={default + 1}") != settings()


def test_the_launcher_the_pool_and_the_trainer_agree_on_the_number_of_restarts() -> None:
    publish, pool, launcher = settings("generator.recovery.max_restarts=7")
    numbers = (publish.fleet.max_restarts, pool.max_restarts, launcher.max_restarts)
    assert numbers == (7, 7, 7)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallel.timeout_s=200"],
            r"generator\.recovery\.update_wait_s = 300\.0 must be less than parallel\.timeout_s = "
            r"200\.0, after which the trainer ranks",
        ),
        (
            ["generator.recovery.suspect_s=900"],
            r"generator\.recovery: suspect_s = 900\.0 must be less than start_s = 600\.0",
        ),
        (
            ["generator.recovery.update_bound_s=300"],
            r"update_wait_s = 300\.0 must be less than update_bound_s = 300\.0",
        ),
        (
            ["generator.checks.alarm_min_updates=65"],
            r"generator\.checks: alarm_min_updates = 65 must not exceed alarm_window_updates = 64",
        ),
        (["generator.checks.alarm_factor=1"], r"generator\.checks\.alarm_factor = 1: .*greater"),
        (["generator.recovery.max_restarts=-1"], r"max_restarts = -1: .*greater than or equal"),
        (["generator.recovery.max=1"], r"max = 1: unknown key; known here: max_restarts"),
        (["verifier.max_restarts=-1"], r"verifier\.max_restarts = -1: .*greater than or equal"),
    ],
)
def test_a_contradiction_is_an_error_that_names_it(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(TINY, overrides)


def test_engines_are_restarted_often_or_never() -> None:
    assert settings("generator.recovery.max_restarts=0")[2].max_restarts == 0
