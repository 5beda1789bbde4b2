"""The controller's client against services that fail in every way that services fail."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI, Request, Response

from tests.sandbox.conftest import request
from verifier_sandbox.client import VerifierClient, VerifiersDown
from verifier_sandbox.mathcheck.result import MathVerdict
from verifier_sandbox.protocol import JudgeRequest, JudgeResult, MathAnswer, Verdict


class Node:
    """A service that answers as `behaviour` says."""

    def __init__(self, behaviour):
        self.behaviour = behaviour
        self.requests: list[JudgeRequest] = []
        self.address = ""

    async def judge(self, http: Request) -> Response:
        self.requests.append(JudgeRequest.model_validate_json(await http.body()))
        return await self.behaviour(self.requests[-1])

    async def maths(self) -> Response:
        answer = MathAnswer(verdict="correct", reason="equal")
        return Response(answer.model_dump_json(), media_type="application/json")


@asynccontextmanager
async def serving(*nodes: Node, port: int = 0):
    servers, tasks = [], []
    for node in nodes:
        app = FastAPI()
        app.add_api_route("/v1/judge", node.judge, methods=["POST"])
        app.add_api_route("/v1/maths", node.maths, methods=["POST"])
        listener = socket.create_server(("127.0.0.1", port))
        node.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        servers.append(server)
        tasks.append(asyncio.create_task(server.serve([listener])))
    try:
        yield
    finally:
        for server in servers:
            server.should_exit = True
            server.force_exit = True
        await asyncio.gather(*tasks)


async def accepts(_request):
    result = JudgeResult(verdict=Verdict.OK, num_passed=1, num_tests=1)
    return Response(result.model_dump_json(), media_type="application/json")


async def slow(request):
    await asyncio.sleep(0.1)
    return await accepts(request)


async def crashes(_request):
    return Response("oops", 500)


async def babbles(_request):
    return Response('{"verdict": "maybe"}', media_type="application/json")


async def is_sick(_request):
    result = JudgeResult(verdict=Verdict.INFRASTRUCTURE, detail="disk full")
    return Response(result.model_dump_json(), media_type="application/json")


async def hangs(_request):
    await asyncio.sleep(60)


async def refuses(_request):
    return Response('{"detail": "no such language"}', 422, media_type="application/json")


class FullAtFirst:
    """Turns the first requests away."""

    def __init__(self, num_refusals: int):
        self.num_left = num_refusals

    async def __call__(self, request):
        self.num_left -= 1
        if self.num_left >= 0:
            return Response("{}", 429, {"Retry-After": "0.1"})
        return await accepts(request)


def judge(*behaviours, num_requests: int = 1, **options):
    """The results and the nodes, after so many requests at once."""

    async def main():
        nodes = [Node(behaviour) for behaviour in behaviours]
        async with serving(*nodes):
            client = VerifierClient([node.address for node in nodes], **options)
            jobs = (client.judge(request(f"print({i})")) for i in range(num_requests))
            try:
                return await asyncio.gather(*jobs), nodes
            finally:
                await client.close()

    return asyncio.run(main())


@pytest.mark.parametrize("fault", [crashes, babbles, is_sick])
def test_another_node_answers_for_one_that_fails(fault):
    results, _ = judge(fault, accepts, num_requests=6)
    assert [result.verdict for result in results] == [Verdict.OK] * 6


def test_load_is_spread_over_nodes():
    _, nodes = judge(slow, slow, slow, num_requests=30)
    assert [len(node.requests) for node in nodes] == [10, 10, 10]


def test_a_full_node_is_asked_again_later():
    results, nodes = judge(FullAtFirst(3), timeout_s=30)
    assert results[0].verdict is Verdict.OK
    assert len(nodes[0].requests) == 4


def test_a_broken_node_is_left_alone():
    # Every second request would meet it otherwise.
    results, nodes = judge(crashes, slow, num_requests=40, breaker_faults=2, breaker_pause_s=60)
    assert [result.verdict for result in results] == [Verdict.OK] * 40
    first_wave = 20
    assert len(nodes[0].requests) <= first_wave + 2


def test_when_nobody_can_answer_it_says_so_and_raises_nothing():
    results, _ = judge(crashes, crashes, max_attempts=3, breaker_pause_s=0.1)
    assert results[0].verdict is Verdict.INFRASTRUCTURE
    assert "HTTP 500" in results[0].detail
    assert results[0].test_ids == [0]


def test_a_silent_node_costs_no_more_than_the_timeout():
    async def main():
        node = Node(hangs)
        async with serving(node):
            client = VerifierClient([node.address], timeout_s=0.2, max_attempts=1)
            async with asyncio.timeout(30):
                result = await client.judge(request("print(1)"))
            await client.close()
            return result

    assert asyncio.run(main()).verdict is Verdict.INFRASTRUCTURE


def test_a_node_that_is_away_for_a_while_costs_no_attempt():
    async def main():
        node = Node(accepts)
        async with serving(node):
            pass  # its address is known, and nobody listens there any more
        options = {"breaker_faults": 1, "breaker_pause_s": 0.02, "max_attempts": 1}
        client = VerifierClient([node.address], **options)
        asking = asyncio.create_task(client.judge(request("print(1)")))
        while client.metrics()["verifier_faults_total"] < 3:
            await asyncio.sleep(0.01)
        port = int(node.address.rpartition(":")[2])
        async with serving(node, port=port):
            result = await asking
        await client.close()
        return result

    assert asyncio.run(main()).verdict is Verdict.OK


def test_while_every_node_is_down_requests_wait_and_none_is_masked():
    async def main():
        node = Node(crashes)
        async with serving(node):
            options = {"breaker_faults": 1, "breaker_pause_s": 1.0, "max_attempts": 1}
            client = VerifierClient([node.address], **options)
            first = await client.judge(request("print(0)"))
            jobs = [asyncio.create_task(client.judge(request(f"print({i})"))) for i in range(20)]
            await asyncio.sleep(0.05)  # its breaker is open: they wait
            node.behaviour = accepts
            results = await asyncio.gather(*jobs)
            await client.close()
            return first, results, client.metrics()

    first, results, metrics = asyncio.run(main())
    assert first.verdict is Verdict.INFRASTRUCTURE
    assert [result.verdict for result in results] == [Verdict.OK] * 20
    assert (metrics["verifier_faults_total"], metrics["verifiers_closed"]) == (1, 1)


def test_an_outage_without_end_is_an_error_that_names_every_node():
    async def main():
        addresses = ["unix:/nonexistent/a.sock", "unix:/nonexistent/b.sock"]
        options = {"breaker_faults": 1, "breaker_pause_s": 60.0, "outage_s": 0.1}
        client = VerifierClient(addresses, **options)
        try:
            await client.judge(request("x"))
        finally:
            await client.close()

    with pytest.raises(VerifiersDown, match=r"no verifier has answered .*a\.sock \(open\).*b\."):
        asyncio.run(main())


def test_a_silent_node_delays_its_own_requests_alone():
    async def main():
        silent, quick = Node(hangs), Node(accepts)
        async with serving(silent, quick):
            client = VerifierClient([silent.address, quick.address], timeout_s=60)
            jobs = [asyncio.create_task(client.judge(request(f"print({i})"))) for i in range(20)]
            async with asyncio.timeout(30):
                while sum(job.done() for job in jobs) < 20 - len(silent.requests):
                    await asyncio.sleep(0.01)
            num_silent = len(silent.requests)
            for job in jobs:
                job.cancel()
            await client.close()
            return num_silent

    assert asyncio.run(main()) <= 10


def test_no_more_requests_are_sent_to_a_node_than_it_may_have():
    results, nodes = judge(slow, num_requests=20, max_connections_per_node=4, timeout_s=0.25)
    assert [result.verdict for result in results] == [Verdict.OK] * 20  # a queue is no fault
    assert len(nodes[0].requests) == 20


def test_a_refused_request_is_reported_and_not_repeated():
    results, nodes = judge(refuses)
    assert results[0].verdict is Verdict.INFRASTRUCTURE
    assert "no such language" in results[0].detail
    assert len(nodes[0].requests) == 1


def test_only_the_drawn_tests_travel():
    async def main():
        node = Node(accepts)
        async with serving(node):
            client = VerifierClient([node.address])
            tests = [(f"in {i}", f"out {i}") for i in range(100)]
            await client.judge(request("x", tests, num_tests=5))
            await client.close()
            return node.requests[0], tests

    sent, tests = asyncio.run(main())
    assert [tuple(test) for test in sent.tests] == [tests[i] for i in sent.test_ids]
    assert len(sent.tests) == 5


def test_maths_answers_come_back_as_verdicts():
    async def main():
        node = Node(accepts)
        async with serving(node):
            client = VerifierClient([node.address])
            result = await client.check_maths("1", "1")
            await client.close()
            return result

    assert asyncio.run(main()).verdict is MathVerdict.CORRECT


HALF_A_PAIR = "\ud800"


def test_half_a_surrogate_pair_travels_as_a_question_mark():
    async def main():
        node = Node(accepts)
        async with serving(node):
            client = VerifierClient([node.address])
            names = {"problem_id": HALF_A_PAIR, "group": HALF_A_PAIR}
            judged = await client.judge(request(f"print('{HALF_A_PAIR}')", **names))
            checked = await client.check_maths(HALF_A_PAIR, HALF_A_PAIR)
            await client.close()
            return judged, checked, node.requests[0]

    judged, checked, sent = asyncio.run(main())
    assert (judged.verdict, checked.verdict) == (Verdict.OK, MathVerdict.CORRECT)
    assert (sent.source, sent.problem_id, sent.group) == ("print('?')", "?", "?")


def test_a_problem_that_cannot_be_sent_is_reported():
    async def main():
        client = VerifierClient(["unix:/nonexistent/verifier.sock"])
        try:
            return await client.judge(request("x", [("", HALF_A_PAIR)]))
        finally:
            await client.close()

    result = asyncio.run(main())
    assert result.verdict is Verdict.INFRASTRUCTURE
    assert "cannot be sent" in result.detail


def test_waiting_for_nodes_names_those_that_are_missing():
    async def main():
        client = VerifierClient(["unix:/nonexistent/verifier.sock"])
        try:
            await client.wait_ready(timeout_s=0.2)
        finally:
            await client.close()

    with pytest.raises(TimeoutError, match=r"/nonexistent/verifier\.sock"):
        asyncio.run(main())


@pytest.mark.parametrize("addresses", [[], ["host:80"], ["ftp://x"]])
def test_bad_addresses_are_refused_at_once(addresses):
    with pytest.raises(ValueError, match="address"):
        VerifierClient(addresses)
