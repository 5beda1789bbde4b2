"""Completions must fit the KV cache and the budget that a stage has of it."""

from __future__ import annotations

import pytest

from megatron_magistral.config import Config
from megatron_magistral.config_file import ConfigError, parse
from megatron_magistral.prompt_room import longest_prompt

RAW = {
    "model": {"shape": {}},
    "data": {"tiny_world": {}},
    "reward": {"l_max": 64, "l_cache": 8},
    "generator": {"num_replicas": 2, "max_total_tokens": 1000},
    "rl": {
        "num_steps": 9,
        "group_size": 2,
        "n_batch": 8,
        "n_minibatch": 8,
        "n_async": 8,
        "microbatch_tokens": 512,
        "optimizer": {"lr": 1.0},
    },
}
LATER = {"begin": {"max_steps": 1}}


def config_of(*stages: dict, **rl: object) -> Config:
    return parse(RAW | {"rl": {**RAW["rl"], **rl, "stages": [LATER | each for each in stages]}})


@pytest.mark.parametrize(
    ("rl", "stages", "message"),
    [
        ({"kv_budget_tokens": 64}, [], r"^rl\.kv_budget_tokens = 64 must hold a prompt and .* 64$"),
        (
            {"kv_budget_tokens": 1001},
            [],
            r"must be at most generator\.max_total_tokens = 1000, all",
        ),
        ({"kv_reserve": 0}, [], r"^rl\.kv_reserve = 0: "),
        ({"kv_reserve": 1.5}, [], r"^rl\.kv_reserve = 1\.5: "),
        (
            {"kv_budget_tokens": 100},
            [{"l_max": 100}],
            r"^rl\.stages\.0: rl\.kv_budget_tokens = 100 must hold .* reward\.l_max = 100$",
        ),
        ({}, [{"kv_budget_tokens": 2000}], r"^rl\.stages\.0: .*\.max_total_tokens = 1000"),
        (  # groups of the first stage are still under way in the second
            {"kv_budget_tokens": 500},
            [{"l_max": 40, "kv_budget_tokens": 60}],
            r"^rl\.stages\.0: rl\.kv_budget_tokens = 60 must hold .* reward\.l_max = 64$",
        ),
    ],
)
def test_a_budget_that_cannot_be_is_one_error(rl: dict, stages: list[dict], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        config_of(*stages, **rl)
    assert "\n" not in str(error.value)


def test_a_cache_that_holds_no_whole_completion_is_an_error() -> None:
    small = {"generator": {"max_total_tokens": 64}}
    with pytest.raises(ConfigError, match=r"^generator\.max_total_tokens = 64 must hold .* 64$"):
        parse(RAW | small)
    sft = {"num_steps": 1, "batch_size": 1, "microbatch_tokens": 99, "optimizer": {"lr": 1.0}}
    parse({**RAW, **small, "rl": None, "sft": sft})  # generates nothing
    with pytest.raises(ConfigError, match=r"^generator\.max_total_tokens = 64 must hold"):
        parse({**RAW, **small, "rl": None, "sft": sft | {"candidate_every_steps": 1}})


def test_fewer_sequences_than_n_async_are_a_warning_with_the_numbers_of_its_stage() -> None:
    assert config_of(kv_budget_tokens=65 * 4).warnings() == []
    (first, second) = config_of(
        {"n_async": 16, "l_max": 100}, kv_budget_tokens=259, kv_reserve=1.0
    ).warnings()
    assert first == (
        "rl.kv_budget_tokens = 259: 2 generators take at most 6 sequences at once that count for "
        "1 x l_max = 64 tokens and their prompts, so rl.n_async = 8 are not reached"
    )
    assert second.startswith("rl.stages.0: rl.kv_budget_tokens = 259: 2 generators take at most 4")


def test_more_sequences_fit_where_they_reserve_less() -> None:
    assert config_of(n_async=16, kv_budget_tokens=33 * 8, kv_reserve=0.5).warnings() == []


def test_warnings_are_of_every_stage() -> None:
    (warning,) = config_of({"n_async": 32}).warnings()
    assert warning.startswith("rl.stages.0: rl.n_async / rl.n_batch = 4.00")


def test_a_stage_replaces_budget_and_reserve() -> None:
    config = config_of(
        {"kv_budget_tokens": 400}, {"kv_reserve": 0.5}, kv_budget_tokens=300, kv_reserve=0.25
    )
    stages = [config.at_stage(index).rl for index in range(3)]
    assert [(rl.kv_budget_tokens, rl.kv_reserve) for rl in stages] == [
        (300, 0.25),
        (400, 0.25),
        (400, 0.5),
    ]


@pytest.mark.parametrize(
    ("config", "context", "room", "why"),
    [
        (config_of(), 200, 136, "reward.l_max = 64 leaves 136 of the model's 200 positions"),
        (config_of(), 9999, 448, "reward.l_max = 64 leaves 448 of rl.microbatch_tokens = 512"),
        (
            config_of({"l_max": 100, "kv_budget_tokens": 120}, kv_budget_tokens=80),
            9999,
            16,  # in the first stage; the second leaves 20
            "reward.l_max = 64 leaves 16 of rl.kv_budget_tokens = 80",
        ),
        (
            config_of({"l_max": 30, "kv_budget_tokens": 74}),
            9999,
            10,  # beside a completion of the first stage
            "reward.l_max = 64 leaves 10 of rl.kv_budget_tokens = 74",
        ),
    ],
)
def test_prompts_must_leave_room_in_every_stage(
    config: Config, context: int, room: int, why: str
) -> None:
    found = longest_prompt(config, context)
    assert (found.num_tokens, found.why) == (room, why)
