"""The validation loss is that of transformers, in every layout, and the best weights are kept."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron_magistral.config_stages import OptimizerConfig, SftConfig
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.megatron import destroy_distributed
from megatron_magistral.trainer.objective import SupervisedObjective
from megatron_magistral.trainer.sft_data import EncodedTrace, sft_sequences
from megatron_magistral.trainer.step import Trainer
from megatron_magistral.trainer.validation import Validator
from tests.distributed.ranks import run_ranks
from tests.trainer.models import VOCAB_SIZE, hf_model, save

pytestmark = pytest.mark.distributed

OPTIMIZER = OptimizerConfig(lr=1e-2)
CONFIG = SftConfig(
    num_steps=5, batch_size=5, microbatch_tokens=32, validate_every_steps=2, optimizer=OPTIMIZER
)


def traces(seed: int) -> list[EncodedTrace]:
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(count)]

    return [(tokens(rng.randint(1, 9)), tokens(rng.randint(1, 12))) for _ in range(5)]


def train_and_validate(hf_dir: Path, root: Path, layout: ParallelLayout) -> Any:
    t = Trainer.create(hf_dir, layout, OPTIMIZER.settings(5), dtype=torch.float32, timeout_s=60)
    validator = Validator(t, traces(1), CONFIG, root / "best", root / "best.json")
    before = validator.loss()
    # Learns the held-out traces for three steps, others afterwards: the loss falls, then rises.
    rows = []
    for step in range(5):
        sequences = sft_sequences(traces(1 if step < 3 else 2))
        mine = sequences[t.mesh.dp_rank :: t.mesh.dp_size]
        t.train_minibatch(t.pack(mine, 32), SupervisedObjective())
        rows.append(validator.after(step + 1, is_last=step == 4))
    again = Validator(t, traces(1), CONFIG, root / "best", root / "best.json").best
    destroy_distributed()
    return before, rows, again


def transformers_loss(directory: Path) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    losses = []
    for prompt, response in traces(1):
        with torch.no_grad():
            logits_TV = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        losses.append(
            torch.nn.functional.cross_entropy(logits_TV, torch.tensor(response), reduction="none")
        )
    return float(torch.cat(losses).mean())


@pytest.mark.parametrize("layout", [ParallelLayout(dp=2), ParallelLayout(pp=2)], ids=["dp2", "pp2"])
def test_the_weights_with_the_least_loss_are_kept(tmp_path: Path, layout: ParallelLayout) -> None:
    hf_dir = save(hf_model("llama"), tmp_path / "model")
    first, second = run_ranks(train_and_validate, 2, hf_dir, tmp_path, layout, timeout_s=300)
    assert first == second  # all ranks agree, or they would part ways
    before, rows, again = first
    assert before == pytest.approx(transformers_loss(hf_dir), rel=1e-5)
    assert [bool(row) for row in rows] == [False, True, False, True, True]
    losses = {step + 1: row["validation_loss"] for step, row in enumerate(rows) if row}
    best_step = min(losses, key=lambda step: losses[step])
    assert losses[best_step] < min(before, losses[5])
    assert rows[4]["validation_loss_best"] == losses[best_step]
    record = json.loads((tmp_path / "best.json").read_text())
    assert record == {"step": best_step, "validation_loss": losses[best_step]}
    assert (again.step, again.validation_loss) == (best_step, losses[best_step])
    assert transformers_loss(tmp_path / "best") == pytest.approx(losses[best_step], rel=1e-5)
