"""A tiny run whose numbers are kept in tests/data/golden_trace.json.

    python -m tests.trainer.golden        # writes them anew, when numbers change on purpose

20 steps of the policy objective on one rank, one thread and fp32: clipping, entropy bonus, warm-up,
weight decay and gradient clipping all take part. Weights and sequences come from Python's `random`,
whose numbers are the same on every machine.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from pathlib import Path

import torch
import transformers

from megatron_magistral.algorithm.settings import AlgorithmSettings
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.megatron import destroy_distributed
from megatron_magistral.trainer.objective import PolicyObjective
from megatron_magistral.trainer.settings import OptimizerSettings, Schedule
from megatron_magistral.trainer.step import Trainer
from megatron_magistral.types import Span, TrainSequence
from tests.distributed.ranks import run_ranks

GOLDEN = Path(__file__).parents[1] / "data" / "golden_trace.json"
KEYS = ("loss", "grad_norm", "entropy")
NUM_STEPS = 20
VOCAB_SIZE = 97
MAX_TOKENS = 48  # two or three microbatches a step

OBJECTIVE = PolicyObjective(
    AlgorithmSettings(eps_low=0.2, eps_high=0.28, entropy_coef=0.01), temperature=0.8
)
OPTIMIZER = OptimizerSettings(
    lr=3e-3,
    min_lr=3e-4,
    schedule=Schedule.COSINE,
    warmup_steps=4,
    total_steps=NUM_STEPS,
    weight_decay=0.1,
    clip_grad=0.3,
)


def trace() -> list[dict[str, float]]:
    """The numbers of each step, from a rank of its own."""
    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(_train, 1, _write_model(Path(directory)))[0]


def _write_model(directory: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    rng = random.Random(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            start, std = (1.0, 0.1) if "norm" in name else (0.0, 0.2)
            values = [rng.gauss(start, std) for _ in range(p.numel())]
            p.copy_(torch.tensor(values).view_as(p))
    model.save_pretrained(directory)
    return directory


def _sequences(step: int) -> list[TrainSequence]:
    """What generators could have sent: log-probabilities about those of the first weights."""
    rng = random.Random(f"golden/{step}")
    lengths = [(rng.randint(1, 6), rng.randint(4, 20)) for _ in range(6)]
    num_tokens = sum(output for _, output in lengths)
    return [
        TrainSequence(
            tokens=tuple(rng.randrange(VOCAB_SIZE) for _ in range(prompt + output)),
            num_prompt_tokens=prompt,
            logprobs=tuple(rng.gauss(-math.log(VOCAB_SIZE), 0.3) for _ in range(output)),
            spans=(Span(0, 0, output),),
            advantage=rng.uniform(-1, 2),
            weight=1.0 / num_tokens,
        )
        for prompt, output in lengths
    ]


def _train(hf_dir: Path) -> list[dict[str, float]]:
    trainer = Trainer.create(hf_dir, ParallelLayout(), OPTIMIZER, dtype=torch.float32, timeout_s=60)
    steps = []
    for step in range(NUM_STEPS):
        stats = trainer.train_minibatch(trainer.pack(_sequences(step), MAX_TOKENS), OBJECTIVE)
        found = stats.metrics | {"loss": stats.loss, "grad_norm": stats.grad_norm}
        steps.append({key: found[key] for key in KEYS})
    destroy_distributed()
    return steps


def main() -> None:
    rows = [{key: float(f"{step[key]:.9g}") for key in KEYS} for step in trace()]
    GOLDEN.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
