"""A small run whose processes can be killed: the real controller, journal, desk, feed and pool.

Engines, verifier and trainer are stand-ins that speak the real protocols. What they do is a
function of the problem alone, so that it can be told what a run must have trained: a completion is
a random first token and a tail that follows from it, every fifth problem is answered alike by all.
Now and then an engine answers what cannot be.
The trainer's weights are the list of what it has trained, which is what its checkpoints hold.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec
from aiohttp import web

from megatron_magistral.config import Config
from megatron_magistral.config_file import load
from megatron_magistral.rollout import desk, recorder
from megatron_magistral.rollout.controller import Controller
from megatron_magistral.rollout.engine import EngineControl, EngineError, server_name
from megatron_magistral.rollout.engine_pool import EnginePool, PoolSettings
from megatron_magistral.rollout.generator import Generator
from megatron_magistral.rollout.sglang_server import ModelLimits
from megatron_magistral.run_folder import RunFolder, Stage
from megatron_magistral.trainer.checkpoint_files import CheckpointFolder, SavedState
from megatron_magistral.trainer.feed import Feed, FeedError, Instead
from megatron_magistral.types import Completion, GradeStatus, Problem, Progress, Reward
from tests.cli_runs import MICRO
from tests.fakes import problem_of
from verifier_sandbox.client import VerifierClient
from verifier_sandbox.mathcheck.result import MathVerdict
from verifier_sandbox.protocol import MathAnswer, MathRequest

EOS = 7
FIRST_PROMPT_TOKEN = 1_000_000
NUM_CHOICES = 100_000
NUM_PROBLEMS = 1000
MAX_STALENESS = 3
TOKENS_A_CHUNK = 3
CHUNK_S = 0.004
FAULT_RATE = 0.01
"""Share of requests that an engine answers in each of the ways of `Fault`."""
TRAIN_S = 0.02
STEPS_A_CHECKPOINT = 2
OVERRIDES = (
    "rl.group_size=4",
    "rl.n_batch=8",
    "rl.n_minibatch=8",
    "rl.n_async=16",
    f"rl.max_staleness={MAX_STALENESS}",
    "parallel.tensor=1",
    "evaluation.num_problems=1",
    "evaluation.num_samples=1",
)


class Fault(StrEnum):
    """What an engine does to one request."""

    REFUSED = "refused"
    NO_LOGPROB = "a token without its log-probability"
    UNKNOWN_WEIGHTS = "tokens of a version that there is not yet"


def number_of(problem: Problem) -> int:
    return int(problem.id.removeprefix("p"))


def is_uniform(number: int) -> bool:
    """Whether all completions of this problem are alike, so that its groups are dropped."""
    return number % 5 == 0


def tail(number: int, first: int) -> Iterator[int]:
    """The tokens after the first one; the last is EOS."""
    rng = random.Random(f"{number}/{first}")
    length = 1 + int(min(60.0, 4.0 * rng.paretovariate(1.3)))
    yield from (rng.randrange(10, NUM_CHOICES) for _ in range(length))
    yield EOS


def logprob_of(position: int) -> float:
    return -(position + 1) / 64  # exact in float32


def config_of(num_steps: int) -> Config:
    return load(MICRO, [*OVERRIDES, f"rl.num_steps={num_steps}"])


# --- the processes -----------------------------------------------------------------------------


def serve_engine(port: int) -> None:
    """Samples a chunk of tokens at a time, as of the version that it holds."""
    logging.getLogger("aiohttp.server").disabled = True  # whoever asked may have been killed
    version = "default"
    seed = random.Random()

    async def generate(request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        draw = seed.random()
        fault = next((f for i, f in enumerate(Fault, 1) if draw < i * FAULT_RATE), None)
        if fault is Fault.REFUSED:
            return web.Response(status=503)
        prompt, *done = payload["input_ids"]
        number = prompt - FIRST_PROMPT_TOKEN
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first = done[0] if done else 0 if is_uniform(number) else seed.randrange(NUM_CHOICES)
        tokens = list(enumerate([first, *tail(number, first)]))[len(done) :]
        while tokens:
            await asyncio.sleep(CHUNK_S)
            new, tokens = tokens[:TOKENS_A_CHUNK], tokens[TOKENS_A_CHUNK:]
            lacks = not tokens and fault is Fault.NO_LOGPROB
            unknown = not tokens and fault is Fault.UNKNOWN_WEIGHTS
            meta = {
                "weight_version": "999999" if unknown else version,
                "finish_reason": None if tokens else {"type": "stop"},
                "output_token_logprobs": [
                    [None if lacks else logprob_of(i), token, None] for i, token in new
                ],
            }
            event = json.dumps({"meta_info": meta}).encode()
            await response.write(b"data: " + event + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def status(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": version})

    async def stamp(request: web.Request) -> web.Response:
        nonlocal version
        version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    app = web.Application()
    for path in ("/health", "/server_info", "/model_info"):
        app.router.add_get(path, status)
    app.router.add_post("/generate", generate)
    app.router.add_post("/update_weight_version", stamp)
    web.run_app(app, host="127.0.0.1", port=port, print=None, handle_signals=False)


def serve_verifier(port: int) -> None:
    """Says what the first token of a response is worth."""
    logging.getLogger("aiohttp.server").disabled = True

    async def maths(request: web.Request) -> web.Response:
        asked = MathRequest.model_validate_json(await request.read())
        worth = int(asked.response.split()[0]) / NUM_CHOICES
        answer = MathAnswer(verdict="correct", reason=str(worth))
        return web.Response(text=answer.model_dump_json(), content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/maths", maths)
    web.run_app(app, host="127.0.0.1", port=port, print=None, handle_signals=False)


class Tokenizer:
    """A problem is one token."""

    eos_token_id = EOS

    def encode(self, prompt: str) -> list[int]:
        return [FIRST_PROMPT_TOKEN + int(prompt)]


def control(root: Path, num_steps: int, port: int, engines: list[str], verifier: str) -> None:
    logging.basicConfig(filename=root / "controller.log", level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    desk.REPUBLISH_PAUSE_S = 0.1
    recorder.TIDY_S = 0.05  # so that many a kill meets it
    asyncio.run(_control(RunFolder(root), config_of(num_steps), port, engines, verifier))


async def _control(
    run: RunFolder, config: Config, port: int, urls: list[str], verifier: str
) -> None:
    limits = ModelLimits(FIRST_PROMPT_TOKEN + NUM_PROBLEMS, 512)
    engines = [Generator(url, limits, decode=lambda ids: " ".join(map(str, ids))) for url in urls]
    # A request may meet every kill of the only verifier: it is asked again until it answers.
    verifiers = VerifierClient([verifier], max_attempts=1000, breaker_pause_s=0.05, outage_s=60.0)

    async def grade(problem: Problem, completion: Completion, group: str) -> Reward:
        found = await verifiers.check_maths(problem.reference, completion.text)
        if found.verdict is MathVerdict.INTERNAL:
            return Reward(0, 0, 0, 0, status=GradeStatus.INFRASTRUCTURE, detail=found.reason)
        return Reward(0.1, float(found.reason), 0, 0)

    pool = EnginePool(engines, PoolSettings(restart_s=60.0, max_restarts=1000, max_tries=100))
    problems = [problem_of(str(i), id=f"p{i}") for i in range(NUM_PROBLEMS)]
    controller = Controller(
        config, run, pool, grade, Tokenizer(), "{problem}", problems, problems[1:2]
    )
    with run.lock("controller"):
        await controller.run("127.0.0.1", port)
    await pool.close()
    for engine in engines:
        await engine.close()


def train(root: Path, num_steps: int, port: int, engines: list[str]) -> None:
    """Begins anew from the latest checkpoint whenever the controller is gone, as a job would."""
    logging.basicConfig(filename=root / "trainer.log", level=logging.WARNING)
    folder = CheckpointFolder(RunFolder(root).checkpoints(Stage.RL))
    while True:
        try:
            _train(folder, num_steps, port, engines)
            return
        except FeedError as error:
            logging.warning("%s", error)
            time.sleep(0.02)


def _train(folder: CheckpointFolder, num_steps: int, port: int, engines: list[str]) -> None:
    folder.recover()
    feed = Feed(f"http://127.0.0.1:{port}", batch_timeout_s=60.0)
    feed.wait_ready(60.0)
    first = folder.latest() or 0
    trained = weights(folder, first)
    feed.start(Progress(first))
    publish(feed, engines, first)
    for step in range(first, num_steps):
        num_updates = 0
        while (batch := feed.pull(step, 0, num_updates)) is Instead.PUBLISH:
            publish(feed, engines, step)
            num_updates += 1
        for minibatch in batch.minibatches:
            for sequence in minibatch.sequences:
                check(sequence, step)
        time.sleep(TRAIN_S)
        trained.append(batch.ordinals)
        if (step + 1) % STEPS_A_CHECKPOINT == 0:
            directory = folder.begin(step + 1)
            (directory / "trained.json").write_bytes(msgspec.json.encode(trained))
            folder.commit(step + 1, SavedState(Progress(step + 1), {}, {}), {})
            folder.prune(keep_last=2, keep_multiples_of=0)
        publish(feed, engines, step + 1)
        feed.acknowledge(step, {"loss": 0.0})
    feed.close()


def weights(folder: CheckpointFolder, step: int) -> list[list[int]]:
    """The groups that the trainer has trained in each step before `step`."""
    return json.loads((folder.path(step) / "trained.json").read_bytes()) if step else []


def publish(feed: Feed, engines: list[str], version: int) -> None:
    """To every engine that is there; to one at least."""
    feed.begin_update(version)
    while not (serving := [url for url in engines if asyncio.run(_stamp(url, version))]):
        time.sleep(0.02)
    feed.end_update(version, [server_name(url) for url in serving])


async def _stamp(url: str, version: int) -> bool:
    async with EngineControl(url) as engine:
        try:
            await engine.stamp(version)
        except EngineError:
            return False
        return True


def check(sequence, step: int) -> None:
    """A completion that was broken off, moved and replayed is what it would have been anyway."""
    prompt, first, *rest = sequence.tokens
    assert rest == list(tail(prompt - FIRST_PROMPT_TOKEN, first)), sequence
    assert list(sequence.logprobs) == [logprob_of(i) for i in range(len(sequence.logprobs))]
    versions = [span.version for span in sequence.spans]
    assert versions == sorted(versions), sequence.spans
    assert step - MAX_STALENESS <= versions[0] and versions[-1] <= step, (step, sequence.spans)
    assert sequence.weight > 0.0, f"not graded: {sequence}"
    assert sequence.advantage != 0.0, sequence
