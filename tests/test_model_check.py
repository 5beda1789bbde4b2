"""A model of the user's own, with experts: which configs can train it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_magistral.config import Config
from megatron_magistral.config_file import ConfigError, load
from megatron_magistral.data.tokenizer import build_tokenizer
from megatron_magistral.preflight import check_inputs
from tests.trainer.models import EXPERT_FAMILIES, hf_model, save

TINY = Path(__file__).parent.parent / "configs" / "tiny.yaml"
VOCAB_SIZE = 512
CONTEXT_LENGTH = 4096


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    tokenizer = build_tokenizer(["one two three four"], VOCAB_SIZE)
    options = dict(vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT_LENGTH)
    models = {family: hf_model(family, **options) for family in ("llama", *EXPERT_FAMILIES)}
    models["mixtral-tied"] = hf_model("mixtral", tied=True, **options)
    for name, model in models.items():
        save(model, root / name)
        tokenizer.save_pretrained(root / name)
    return {name: root / name for name in models}


def config_for(directory: Path, *overrides: str) -> Config:
    return load(TINY, ["model.shape=null", f"model.path={directory}", *overrides])


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.tensor=2", "parallel.expert=2"),
        ("parallel.tensor=2", "parallel.data=2", "parallel.expert=4"),
        ("parallel.tensor=1", "parallel.pipeline=2"),
    ],
)
def test_a_model_with_experts_can_be_trained(
    directories: dict[str, Path], family: str, layout: tuple[str, ...]
) -> None:
    assert check_inputs(config_for(directories[family], *layout)).context_length == CONTEXT_LENGTH


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        (
            "mixtral",
            ("parallel.data=8", "parallel.expert=8"),
            "parallel: ep = 8 must divide the model's 4 experts",
        ),
        (
            "qwen3_moe",
            ("parallel.tensor=2", "parallel.sequence=false"),
            "parallel: tp = 2 needs sequence parallelism",
        ),
        ("llama", ("parallel.expert=2",), "parallel: ep = 2 must be 1: the model has no experts"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_name(
    directories: dict[str, Path], family: str, overrides: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_inputs(config_for(directories[family], *overrides))


def test_tied_embeddings_and_experts_can_be_fine_tuned_but_not_served(
    directories: dict[str, Path],
) -> None:
    directory = directories["mixtral-tied"]
    check_inputs(config_for(directory, "rl=null"))
    with pytest.raises(ConfigError, match="tie_word_embeddings = true cannot be served"):
        check_inputs(config_for(directory))
