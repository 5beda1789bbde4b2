"""Publishing from trainer ranks to fake engines, of which some fail: ranks stay in step."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_magistral.data.tokenizer import build_tokenizer
from megatron_magistral.prompts import load_template
from megatron_magistral.rollout.engine import Phase
from megatron_magistral.trainer.layout import ParallelLayout
from megatron_magistral.trainer.megatron import destroy_distributed
from megatron_magistral.trainer.publish import PublishSettings, WeightPublisher
from megatron_magistral.weights.fleet import FleetExhausted, FleetSettings
from megatron_magistral.weights.settings import PlanKind
from tests.distributed.cases import trainer
from tests.distributed.ranks import run_ranks
from tests.rollout.fake_engine import FakeEngine, Fault
from tests.trainer.models import hf_model, save
from tests.weights.test_transfer import UPDATE_PATHS

pytestmark = pytest.mark.distributed

VOCAB_SIZE = 512
SETTINGS = PublishSettings(fleet=FleetSettings(alive_s=2.0, wait_s=2.0))
CONFIG: Any = SimpleNamespace(
    rl=SimpleNamespace(weight_bucket_mib=0.1, weight_plan=PlanKind.GATHER, microbatch_tokens=64),
    data=SimpleNamespace(prompt_file=None),
    parallel=SimpleNamespace(timeout_s=60.0),
    generator=SimpleNamespace(
        dtype="float32", start_timeout_s=60.0, update_timeout_s=30.0, tensor_parallel=1
    ),
)


@dataclass
class FakeFeed:
    """Keeps what the controller would be told."""

    begun: list[int] = field(default_factory=list)
    ended: list[tuple[int, list[str]]] = field(default_factory=list)

    def wait_ready(self, timeout_s: float) -> None: ...

    def begin_update(self, version: int) -> list[str]:
        self.begun.append(version)
        return []

    def end_update(self, version: int, engines: list[str]) -> None:
        self.ended.append((version, engines))


@dataclass(frozen=True)
class Published:
    """What one rank saw of three updates; `serving` are the engines, by their index."""

    metrics: list[dict[str, float]]
    error: str
    serving: list[tuple[int, list[int]]]
    gathered: dict[str, torch.Tensor]
    held: list[dict[str, torch.Tensor]]


def _publish(
    hf_dir: Path, layout: ParallelLayout, faults: list[dict[str, Fault]], sound_calls: int = 0
) -> Published:
    """Three updates; `faults` of each engine begin after the first one and so many more calls."""
    feed: Any = FakeFeed()
    speaks = os.environ["RANK"] == "0"
    engines = [FakeEngine() for _ in faults] if speaks else []
    names = [engine.url.removeprefix("http://") for engine in engines]
    metrics, error = [], ""
    with trainer(hf_dir, layout) as t:
        urls = [engine.url for engine in engines]
        publisher = WeightPublisher(t, feed, CONFIG, urls, speaks=speaks, settings=SETTINGS)
        try:
            for version in range(3):
                metrics.append(publisher.publish(version))
                for engine, mine in zip(engines, faults, strict=False):
                    engine.faults = dict(mine)
                    engine.sound_calls |= {
                        path: engine.calls.count(path) + sound_calls for path in mine
                    }
        except FleetExhausted as failure:
            error = str(failure)
        gathered = {n: w.clone() for bucket in t.named_hf_buckets(1 << 30) for n, w in bucket}
        publisher.close()
    destroy_distributed()
    serving = [(v, [names.index(name) for name in named]) for v, named in feed.ended]
    held = [engine.weights for engine in engines]
    for engine in engines:
        engine.close()
    return Published(metrics, error, serving, gathered, held)


def _model_directory(family: str, directory: Path) -> Path:
    save(hf_model(family, vocab_size=VOCAB_SIZE), directory)
    build_tokenizer([load_template()], VOCAB_SIZE).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model_directory("llama", tmp_path_factory.mktemp("m") / "m")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", ParallelLayout(tp=2)),
        ("llama", ParallelLayout(pp=2)),
        ("llama", ParallelLayout(pp=2, vpp=2)),
        ("llama", ParallelLayout(tp=2, pp=2)),
        ("mixtral", ParallelLayout(dp=2, ep=2)),
    ],
    ids=["tp2", "pp2", "pp2-vpp2", "tp2-pp2", "ep2"],
)
def test_every_engine_gets_the_weights_that_the_ranks_hold(
    tmp_path: Path, family: str, layout: ParallelLayout
) -> None:
    hf_dir = _model_directory(family, tmp_path / "model")
    first, *others = run_ranks(_publish, layout.world_size, hf_dir, layout, [{}, {}])
    assert first.serving == [(0, [0, 1]), (1, [0, 1]), (2, [0, 1])]
    assert all(other.metrics == [{}, {}, {}] for other in others)
    assert first.metrics[0]["update_tensors_checked"] == len(first.gathered)  # on both sides
    for held in first.held:
        assert held.keys() == first.gathered.keys()
        assert all(torch.equal(held[name], w) for name, w in first.gathered.items())
    for metrics in first.metrics:
        assert metrics["update_rounds"] == 1 and metrics["engines_serving"] == 2
        assert metrics["probe_failures"] == 0 and metrics["probe_gap_mean"] > 0


@pytest.mark.parametrize(
    ("fault", "sound_calls"), [(Fault.REFUSE, 0), (Fault.DIE, 1)], ids=["stage 0", "stage 1"]
)
def test_an_engine_that_fails_costs_rounds_and_the_ranks_stay_in_step(
    hf_dir: Path, fault: Fault, sound_calls: int
) -> None:
    """It fails in a bucket of that stage: they take turns."""
    faults = [{UPDATE_PATHS[Phase.TRANSFER]: fault}, {}]
    first, other = run_ranks(_publish, 2, hf_dir, ParallelLayout(pp=2), faults, sound_calls)
    assert first.serving == [(0, [0, 1]), (1, [1]), (2, [1])]
    assert [m["update_rounds"] > 1 for m in first.metrics[:2]] == [False, True]
    assert [m["engines_quarantined"] for m in first.metrics] == [0, 1, 1]
    assert first.error == other.error == ""
    assert all(torch.equal(first.held[1][name], w) for name, w in first.gathered.items())


def test_when_no_engine_is_left_every_rank_says_so(hf_dir: Path) -> None:
    faults = [{UPDATE_PATHS[Phase.BEGIN]: Fault.DIE}]
    first, other = run_ranks(_publish, 2, hf_dir, ParallelLayout(tp=2), faults)
    assert "update to version 1: no engine could be updated" in first.error
    assert "engine 127.0.0.1:" in first.error and "update to version 1" in other.error
    assert first.serving == [(0, [0])]
