"""Whether a user's model directory can be trained and served as a config says."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from megatron_magistral.config import Config
from megatron_magistral.config_file import ConfigError
from megatron_magistral.trainer.layout import LayoutError, ParallelLayout, check_layout
from megatron_magistral.weights.architecture import (
    Architecture,
    ArchitectureError,
    read_architecture,
)


def check_model(config: Config, model: Path) -> Architecture:
    """The architecture in `model`. Raises ConfigError with a line for each thing that cannot be."""
    try:
        arch = read_architecture(model)
    except ArchitectureError as error:
        raise ConfigError(f"model.path = {model}: {error}") from error
    parallel, generator = config.parallel, config.generator
    problems = [
        *_layout(arch, ParallelLayout.of(parallel), "parallel"),
        *_layout(arch, ParallelLayout(generator.tensor_parallel), "generator.tensor_parallel"),
        *_tokenizer(arch, model),
    ]
    if arch.max_position_embeddings <= config.longest_completion:
        problems.append(
            f"reward.l_max = {config.longest_completion}: a prompt and a whole completion must "
            f"fit into the model's {arch.max_position_embeddings} positions"
        )
    if config.rl is not None and arch.experts is not None and arch.tied_embeddings:
        problems.append(
            f"model.path = {model}: tie_word_embeddings = true cannot be served in the rl stage: "
            "SGLang gives a model with experts an output layer of its own"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return arch


def _layout(arch: Architecture, layout: ParallelLayout, section: str) -> list[str]:
    try:
        check_layout(arch, layout)
    except LayoutError as error:
        return [f"{section}: {error}"]
    return []


def _tokenizer(arch: Architecture, model: Path) -> list[str]:
    path = model / "tokenizer.json"
    if not path.is_file():
        return [f"model.path = {model}: has no tokenizer.json"]
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # all that the library raises for a file that it cannot read
        return [f"{path}: cannot be read as a tokenizer: {error}"]
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > arch.vocab_size:
        return [
            f"model.path = {model}: its tokenizer has {size} ids but the model only "
            f"{arch.vocab_size} (vocab_size in config.json); an id beyond would end a generator"
        ]
    return []
