"""The weights of SFT that solve most are kept. With real SGLang it takes a minute: slow."""

import asyncio
import json

import pytest
from safetensors.torch import load_file

from megatron_magistral import selection
from megatron_magistral.config import Config
from megatron_magistral.evals.report import EvalReport, summarise
from megatron_magistral.rollout.engine import EngineUnreachable, Phase
from megatron_magistral.run_folder import RunFolder, Stage, stages_of
from megatron_magistral.selection import (
    Measurement,
    NoCandidate,
    StopRequested,
    best_step,
    select,
    until_stop_requested,
)
from tests.cli_runs import MICRO, CliRun
from tests.fakes import graded_of, problem_of
from tests.rollout.test_engine_pool import Engine, settle


def report(num_solved: int, num_samples: int = 10) -> EvalReport:
    samples = [graded_of(passed_fraction=float(i < num_solved)) for i in range(num_samples)]
    return summarise([(problem_of(), samples)], {})


@pytest.fixture
def run(tmp_path):
    """A run folder as SFT leaves it, with three candidates."""
    folder = RunFolder(tmp_path)
    for step in (10, 20, 30):
        folder.sft_candidate(step).mkdir(parents=True)
        (folder.sft_candidate(step) / "weights").write_text(f"after {step} steps")
    folder.sft_model.mkdir()
    (folder.sft_model / "weights").write_text("the last")
    return folder


class Measured:
    """Takes the place of engines."""

    def __init__(self, solved):
        self.solved = solved
        self.asked = []

    async def __call__(self, step, model):
        assert (model / "weights").read_text() == f"after {step} steps"
        self.asked.append(step)
        return report(self.solved[step])


def test_the_candidate_that_solves_most_becomes_the_model(run):
    step, best = asyncio.run(select(run, Measured({10: 3, 20: 7, 30: 5})))
    assert (step, best.overall.pass_at_1) == (20, 0.7)
    assert (run.sft_model / "weights").read_text() == "after 20 steps"
    assert json.loads(run.sft_selected.read_text()) == {"step": 20, "pass_at_1": 0.7}
    assert all((path / "weights").exists() for path in run.sft_candidates().values())


def test_what_was_measured_before_an_interruption_is_not_measured_again(run):
    first = Measured({10: 9, 20: 7})  # and then breaks
    with pytest.raises(KeyError):
        asyncio.run(select(run, first))
    second = Measured({30: 5})
    assert asyncio.run(select(run, second))[0] == 10
    assert (first.asked, second.asked) == ([10, 20, 30], [30])


def test_of_equals_the_one_with_fewer_steps_is_kept():
    assert best_step({30: report(5), 10: report(5), 20: report(4)}) == 10


@pytest.mark.parametrize("reports", [{}, {10: report(0, num_samples=0)}])
def test_nothing_to_choose_from_is_an_error(reports):
    with pytest.raises(NoCandidate, match=f"of {len(reports)} candidates none has a pass@1"):
        best_step(reports)


def test_a_change_of_the_kept_model_does_not_reach_the_candidate(run):
    asyncio.run(select(run, Measured({10: 3, 20: 7, 30: 5})))
    asyncio.run(select(run, Measured({})))  # replaces the same directory once more
    assert (run.sft_candidate(20) / "weights").read_text() == "after 20 steps"


class LoadingEngine(Engine):
    """Has the weights of the model directories that it is told to load."""

    def __init__(self, name):
        super().__init__(name)
        self.loaded = []
        self.held = -1
        self.is_down = False

    async def load_model(self, directory, version, timeout_s):
        if self.is_down:
            raise EngineUnreachable(self.name, Phase.LOAD, 0.1, "gone")
        self.loaded.append(version)
        self.held = version


async def grade(problem, completion, group):
    return graded_of(passed_fraction=1.0).reward


def measurement(*engines):
    config = Config.model_validate(
        {
            "model": {"shape": {}},
            "data": {"tiny_world": {}},
            "reward": {"l_max": 64, "l_cache": 8},
            "rl": None,
            "sft": {
                "num_steps": 4,
                "batch_size": 2,
                "microbatch_tokens": 64,
                "optimizer": {"lr": 1.0},
            },
            "evaluation": {"num_samples": 3},
        }
    )
    return Measurement(config, engines, grade, lambda problem: [1], 2, [problem_of()])


def test_an_engine_that_was_restarted_gets_the_candidate_before_it_is_asked_again(monkeypatch):
    monkeypatch.setattr(selection, "LOOK_S", 0.001)

    async def scenario():
        engine = LoadingEngine("e0")
        measure = measurement(engine)
        measuring = asyncio.create_task(measure(20, None))
        await settle()
        assert (engine.loaded, len(engine.salts)) == ([20], 3)
        engine.held = -1  # what a server has that was started anew
        engine.may_answer.set()
        engine.interrupt()
        report = await measuring
        assert engine.loaded == [20, 20]
        assert report.overall.pass_at_1 == 1.0
        assert set(engine.salts) == {"v20"}
        await measure.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_candidate_is_measured_on_the_engines_that_could_load_it(caplog):
    async def scenario():
        engines = [LoadingEngine("e0"), LoadingEngine("e1")]
        engines[1].is_down = True
        for engine in engines:
            engine.may_answer.set()
        measure = measurement(*engines)
        await measure(20, None)
        assert [len(engine.salts) for engine in engines] == [3, 0]
        await measure.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert "engine e1: load a model failed" in caplog.text


def test_a_candidate_that_no_engine_can_load_is_an_error():
    async def scenario():
        engine = LoadingEngine("e0")
        engine.is_down = True
        measure = measurement(engine)
        with pytest.raises(EngineUnreachable, match="e0: load a model failed after"):
            await measure(20, None)
        await measure.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_request_to_stop_ends_the_stage(run):
    run.stop_requested.touch()
    with pytest.raises(StopRequested, match="measured are kept"):
        asyncio.run(until_stop_requested(run))


def test_only_a_run_that_keeps_candidates_has_the_stage():
    values = {
        "model": {"shape": {}},
        "data": {"tiny_world": {}},
        "reward": {"l_max": 64, "l_cache": 8},
        "sft": {
            "num_steps": 4,
            "batch_size": 2,
            "microbatch_tokens": 64,
            "optimizer": {"lr": 1.0},
        },
    }
    config = Config.model_validate(values)
    assert stages_of(config) == [Stage.PREPARE, Stage.SFT]
    values["sft"]["candidate_every_steps"] = 2
    assert stages_of(Config.model_validate(values))[-1] is Stage.SELECTION


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.distributed
def test_real_engines_choose_between_the_weights_of_a_real_sft(tmp_path):
    overrides = ("sft.candidate_every_steps=40", "evaluation.num_samples=1")
    with CliRun(tmp_path, "sft", str(MICRO), *overrides) as cli:
        assert cli.wait() == 0, cli.output
        run = RunFolder(cli.folder)
        assert cli.left_running() == []
    assert list(run.sft_candidates()) == [40, 60]
    reports = {step: EvalReport.load(run.eval_candidate(step)) for step in (40, 60)}
    assert {step: r.protocol["version"] for step, r in reports.items()} == {40: 40.0, 60: 60.0}
    record = json.loads(run.sft_selected.read_text())
    assert record["step"] == best_step(reports)
    assert f"SFT: kept the weights after {record['step']} steps" in cli.output
    kept, model = (
        load_file(path / "model.safetensors")
        for path in (run.sft_candidate(record["step"]), run.model)
    )
    assert all(kept[name].equal(model[name]) for name in kept)
