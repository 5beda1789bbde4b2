"""Role `prepare`: makes what a run folder needs before its first stage.

A generated world is written to <run>/data; a model shape becomes <run>/models/initial, with a
tokenizer of its own that is trained on the world's texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_magistral.config import Config, ModelShape
from megatron_magistral.config_file import load
from megatron_magistral.data import tiny_world
from megatron_magistral.data.datasets import Datasets, dataset_paths
from megatron_magistral.data.tokenizer import TinyModelShape, build_initial_model, build_tokenizer
from megatron_magistral.prompts import load_template
from megatron_magistral.run_folder import RunFolder


def prepare(config: Config, run: RunFolder) -> None:
    world = config.data.tiny_world
    if world is not None:
        tiny_world.write(
            tiny_world.generate(
                config.run.seed, world.num_train, world.num_held_out, world.num_traces
            ),
            run.data,
        )
    if config.model.shape is not None:
        _build_model(config, config.model.shape, run)


def _build_model(config: Config, shape: ModelShape, run: RunFolder) -> None:
    datasets = Datasets.read(dataset_paths(config, run))
    texts = [load_template(config.data.prompt_file)]
    texts += [f"{trace.statement}\n{trace.response}" for trace in datasets.traces]
    texts += [problem.statement for problem in datasets.train]
    build_initial_model(
        run.initial_model,
        build_tokenizer(texts, shape.vocab_size),
        TinyModelShape(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.ffn_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=shape.context_length,
            tie_word_embeddings=shape.tied_embeddings,
        ),
        config.run.seed,
    )


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(run: Annotated[Path, typer.Option()]) -> None:
    folder = RunFolder(run)
    prepare(load(folder.config), folder)


if __name__ == "__main__":
    app()
