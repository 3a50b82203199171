"""A router, a daemon and emulated machines as processes, spoken to over gRPC alone."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from services.engine.emulated import expected_tokens, settings_from_options
from splitwise.rpc.v1 import router_pb2 as pb
from splitwise.rpc.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Pool
from splitwise.text import ByteVocabulary
from tests.services.gateway.live_cluster import PATIENCE, LiveCluster
from tests.support.router_calls import RouterCalls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)
ENGINE: dict[str, Any] = {"time_scale": 0.05}
SETTINGS = settings_from_options(ENGINE)
PROMPT = list(range(1, 40))
LIMIT = SETTINGS.max_model_len


def text_of(tokens: list[int]) -> str:
    detokenizer = ByteVocabulary(SETTINGS.vocab_size).detokenizer()
    return detokenizer.push(tokens) + detokenizer.flush()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[LiveCluster]:
    cluster = LiveCluster(tmp_path)
    try:
        yield cluster
    finally:
        await cluster.stop()


async def calls_to(cluster: LiveCluster, *settings: str) -> RouterCalls:
    await cluster.start_router(*settings)
    return RouterCalls((await cluster.router.ready())["address"])


async def until_serving(router: RouterCalls, wanted: bool = True) -> None:
    end = time.monotonic() + PATIENCE
    while await router.serving() is not wanted:
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


async def test_requests_and_refusals(cluster: LiveCluster) -> None:
    """One cluster for all of it, since starting one takes longer than the requests."""
    router = await calls_to(cluster)
    assert not await router.serving()
    nobody = await router.generate("x")
    assert (nobody.code, nobody.retry_after) == ("UNAVAILABLE", "1000")
    await cluster.start_machines("1xH100:prompt", "1xH100:token", **ENGINE)
    await until_serving(router)
    await check_answers(router)
    before = (await router.cluster()).counters
    await check_bad_input(router)
    after = (await router.cluster()).counters
    assert before == after  # nothing of it was started
    await check_deadline(router)
    await check_registration(router)
    await check_drain(router)
    await check_watch(router)
    await cluster.until_idle()
    await router.channel.close(None)


async def check_answers(router: RouterCalls) -> None:
    wanted = expected_tokens(SETTINGS, PROMPT, 30)
    answer = await router.generate(PROMPT, max_tokens=30, temperature=0, client_request_id="mine", logprobs=2)
    assert (answer.token_ids, answer.text) == (wanted, text_of(wanted))
    assert answer.finished is not None
    assert answer.finished.reason == FINISH_REASON_LENGTH
    assert (answer.finished.prompt_tokens, answer.finished.output_tokens) == (len(PROMPT), 30)
    assert answer.finished.transfer.bytes > 0
    assert answer.finished.timing.ttft_us > 0
    assert {message.client_request_id for message in answer.messages} == {"mine"}
    assert answer.messages[0].prompt_tokens == len(PROMPT)
    assert sum(len(message.logprobs) for message in answer.messages) == 30
    explained = await router.stub.Explain(pb.ExplainRequest(request_id=answer.messages[0].request_id))
    assert explained.decisions[0].kind == "assign"
    assert explained.decisions[0].prompt_machine == answer.finished.placement.prompt_machine
    assert (await router.refusal("Explain", pb.ExplainRequest(request_id="none")))[0] == "NOT_FOUND"

    one = await router.generate(PROMPT, max_tokens=1, temperature=0)
    assert one.finished is not None
    assert (one.token_ids, one.finished.HasField("transfer")) == (wanted[:1], False)

    whole = text_of(wanted)
    first = len(text_of(wanted[:1]))
    stop = whole[first - 1 : first + 3]  # begins in the prompt machine's token
    stopped = await router.generate(PROMPT, max_tokens=30, temperature=0, stop=[stop.encode()])
    assert stopped.finished is not None
    assert (stopped.text, stopped.finished.reason) == (whole[: whole.index(stop)], FINISH_REASON_STOP)
    assert stopped.finished.stop_matched == stop

    prompt = [1] * (LIMIT - 3)
    exactly = await router.generate(prompt, max_tokens=3, temperature=0, ignore_eos=True)
    assert exactly.token_ids == expected_tokens(SETTINGS, prompt, 3, ignore_eos=True)
    twins = await asyncio.gather(
        *[router.generate(PROMPT, max_tokens=30, temperature=0, client_request_id="same") for _ in range(4)]
    )
    assert all(twin.token_ids == wanted for twin in twins)
    assert len({twin.messages[0].request_id for twin in twins}) == 4


async def check_bad_input(router: RouterCalls) -> None:
    cases: list[tuple[Any, dict[str, Any], str, str]] = [
        ("", {}, "INVALID_ARGUMENT", "text: "),
        ([], {}, "INVALID_ARGUMENT", "token_ids.ids: "),
        ("x" * 6_000_000, {}, "INVALID_ARGUMENT", "text: 6000000 bytes; the limit is 4194304"),
        ([70_000] * 2_000_000, {}, "INVALID_ARGUMENT", "token_ids.ids: 2000000 ids; the limit is"),
        ([1] * (LIMIT - 3), {"max_tokens": 4}, "INVALID_ARGUMENT", "sampling.max_tokens: "),
        ([1] * LIMIT, {}, "INVALID_ARGUMENT", "token_ids.ids: "),
        ([1, SETTINGS.vocab_size], {}, "INVALID_ARGUMENT", "token_ids.ids[1]: "),
        ("x", {"temperature": -1}, "INVALID_ARGUMENT", "sampling.temperature: "),
        ("x", {"n": 2}, "INVALID_ARGUMENT", "sampling.n: "),
        ("x", {"stop": [b"ok", b"\xff"]}, "INVALID_ARGUMENT", "sampling.stop[1]: "),
        ("x", {"model": "other"}, "NOT_FOUND", "model: 'other'"),
    ]
    for prompt, options, code, details in cases:
        answer = await router.generate(prompt, **options)
        assert answer.code == code, (options, answer.details)
        assert answer.details.startswith(details), answer.details
    text_is_2 = b"\x12\x02\xc3\x28"  # field `text` with bytes that are not UTF-8
    for message in (text_is_2, b"\x12\x7fcut off"):
        answer = await router.raw(message)
        assert (answer.code, answer.details.split(":")[0]) == ("INVALID_ARGUMENT", "request")


async def check_deadline(router: RouterCalls) -> None:
    answer = await router.generate(PROMPT, max_tokens=LIMIT - 40, ignore_eos=True, timeout=0.7)
    assert answer.code == "DEADLINE_EXCEEDED"
    end = time.monotonic() + PATIENCE
    while (await router.cluster()).running:
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


async def check_registration(router: RouterCalls) -> None:
    known = (await router.cluster()).machines[0].description

    def changed(**facts: Any) -> pb.RegisterRequest:
        request = pb.RegisterRequest(machine=known)
        for name, value in facts.items():
            target = request.machine.identity if name in ("machine_id", "incarnation") else request.machine
            setattr(target, name, value)
        return request

    renewed = await router.stub.Register(changed())
    assert renewed.lease_ms > renewed.heartbeat_ms > 0
    older, newer = known.identity.incarnation - 1, known.identity.incarnation + 1
    for facts, code, word in [
        ({"home_pool": Pool.POOL_MIXED}, "INVALID_ARGUMENT", "machine.home_pool"),
        ({"machine_id": "no spaces"}, "INVALID_ARGUMENT", "machine.identity.machine_id"),
        ({"address": "::1:9000"}, "INVALID_ARGUMENT", "machine.address"),
        ({"incarnation": older}, "ABORTED", "machine.identity.incarnation"),
        ({"incarnation": newer, "address": "[::1]:9"}, "ALREADY_EXISTS", "machine.identity.machine_id"),
        ({"machine_id": "ghost", "address": "127.0.0.1:9"}, "UNAVAILABLE", "127.0.0.1:9"),
    ]:
        got, message = await router.refusal("Register", changed(**facts))
        assert got == code, message
        assert word in message
    assert len((await router.cluster()).machines) == 2


async def check_drain(router: RouterCalls) -> None:
    code, message = await router.refusal("DrainMachine", pb.DrainMachineRequest(machine_id="none"))
    assert code == "NOT_FOUND"
    assert "token-0" in message
    answer = await router.stub.DrainMachine(pb.DrainMachineRequest(machine_id="token-0"))
    assert answer.state == "draining"
    answer = await router.stub.DrainMachine(pb.DrainMachineRequest(machine_id="token-0", undo=True))
    assert answer.state == "serving"
    assert (await router.generate(PROMPT, max_tokens=3)).code == "OK"


async def check_watch(router: RouterCalls) -> None:
    watch = router.stub.WatchCluster(pb.DescribeClusterRequest())
    first = await watch.read()
    assert {machine.state for machine in first.machines} == {"serving"}
    await router.stub.DrainMachine(pb.DrainMachineRequest(machine_id="token-0"))
    async with asyncio.timeout(PATIENCE):
        while "draining" not in {machine.state for machine in (await watch.read()).machines}:
            pass
    watch.cancel()
    await router.stub.DrainMachine(pb.DrainMachineRequest(machine_id="token-0", undo=True))


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
async def test_a_router_on_ipv6(cluster: LiveCluster) -> None:
    router = await calls_to(cluster, "--listen", "[::1]:0")
    assert (await cluster.router.ready())["address"].startswith("[::1]:")
    await cluster.start_machines("1xH100:prompt", "1xH100:token", **ENGINE)
    await until_serving(router)
    answer = await router.generate(PROMPT, max_tokens=5, temperature=0)
    assert answer.token_ids == expected_tokens(SETTINGS, PROMPT, 5)
    await router.channel.close(None)
