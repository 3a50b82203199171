"""What clients ask and get over gRPC: router, machines and daemons are processes of their own."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from splitwise.rpc.v1 import common_pb2, router_pb2
from splitwise.sim.compare import load_log
from tests.services.router.cluster import PROMPT, Answer, expected, request, text_of

if TYPE_CHECKING:
    from tests.services.router.cluster import RouterCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
LIMIT = 8192
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


async def counters(cluster: RouterCluster) -> Any:
    return (await cluster.describe()).counters


@pytest.mark.parametrize("mode", [1, 2])
async def test_texts_are_those_of_one_engine(cluster: RouterCluster, mode: int) -> None:
    sizes = [(length, count) for length in (1, 15, 16, 17, 33, 600) for count in (1, 2, 30)]
    asked = {size: request(PROMPT[: size[0]], max_tokens=size[1]) for size in sizes}
    for one in asked.values():
        one.transfer_mode = mode
    answers = await asyncio.gather(*map(cluster.ask, asked.values()))
    for (length, count), answer in zip(asked, answers, strict=True):
        assert answer.error is None
        assert answer.ids == expected(count, PROMPT[:length]), (length, count)
        assert answer.text == text_of(answer.ids)
        assert (answer.finished.reason, answer.finished.output_tokens) == (LENGTH, count)
        assert answer.finished.prompt_tokens == length
        assert answer.finished.HasField("transfer") == (count > 1), (length, count)
        if count > 1:
            assert answer.finished.transfer.bytes > 0
            assert answer.finished.timing.second_us > 0
    await cluster.until_free()


@pytest.mark.parametrize(("length", "mode"), [(99, 1), (100, 2)])
async def test_one_setting_decides_how_a_prompt_is_pushed(
    cluster: RouterCluster, length: int, mode: int
) -> None:
    """The cluster is started with `serialized_below_tokens` 100; a request may ask for the other way."""
    prompt = [3, *range(length - 1)]
    asked = await cluster.ask(request(prompt, max_tokens=4))
    assert asked.finished.transfer.mode == mode
    other = request(prompt, max_tokens=4)
    other.transfer_mode = 3 - mode  # type: ignore[assignment]
    answer = await cluster.ask(other)
    assert answer.finished.transfer.mode == 3 - mode
    assert asked.ids == answer.ids == expected(4, prompt)


async def test_stop_strings_across_the_hand_over(cluster: RouterCluster) -> None:
    ids = expected(20)
    text, first, second = text_of(ids), len(text_of(ids[:1])), len(text_of(ids[:2]))
    stops = (text[first - 1 : first + 1], text[first - 2 : second + 3], text[:first])
    for stop in stops:
        for others in ([], [stop + "\0"], ["\0" + stop]):  # one that has it as a prefix, or a suffix
            answer = await cluster.ask(request(max_tokens=20, stop=[s.encode() for s in [*others, stop]]))
            assert (answer.text, answer.finished.reason) == (text[: text.index(stop)], STOP)
            assert answer.finished.stop_matched == stop
    await cluster.until_free()


async def test_min_tokens_counts_the_first_token(cluster: RouterCluster) -> None:
    ids = expected(20)
    whole = text_of(ids)
    stop = whole[: len(text_of(ids[:1]))]  # the first token itself
    answer = await cluster.ask(request(max_tokens=5, min_tokens=5, stop=[stop.encode()]))
    assert (answer.ids, answer.finished.reason) == (ids[:5], LENGTH)


async def test_two_models_are_never_crossed(cluster: RouterCluster) -> None:
    assert expected(12) != expected(12, model="other")
    models = ["emulated", "other"] * 12
    answers = await asyncio.gather(*(cluster.ask(request(model=model, max_tokens=12)) for model in models))
    for model, answer in zip(models, answers, strict=True):
        assert answer.ids == expected(12, model=model)
        nodes = {answer.finished.placement.prompt_machine[-1], answer.finished.placement.token_machine[-1]}
        assert nodes <= ({"c"} if model == "other" else {"a", "b"})


async def test_equal_client_ids_are_two_requests(cluster: RouterCluster) -> None:
    asked = [request(PROMPT[:length], max_tokens=10) for length in (40, 50)]
    for one in asked:
        one.client_request_id = "same"
    one, two = await asyncio.gather(*map(cluster.ask, asked))
    assert (one.ids, two.ids) == (expected(10, PROMPT[:40]), expected(10, PROMPT[:50]))


# What HTTP cannot carry; the fields that both have are refused in tests/services/requests.
BAD: list[tuple[Any, str, str]] = [
    (request("x", temperature=float("nan")), "INVALID_ARGUMENT", "sampling.temperature"),
    (request("x", stop=[b"a", b"a\xff"]), "INVALID_ARGUMENT", "sampling.stop[1]"),
    (request("x", stop=[b"a"] * 17), "INVALID_ARGUMENT", "sampling.stop"),
    (request("x", stop_token_ids=[5, 32_000]), "INVALID_ARGUMENT", "sampling.stop_token_ids[1]"),
    (request("x", logit_bias={5: 101}), "INVALID_ARGUMENT", "sampling.logit_bias[5]"),
    (request("x", model="unknown"), "NOT_FOUND", "model"),
    (request("x", model=""), "NOT_FOUND", "model"),
    (request("x" * 6_000_000), "INVALID_ARGUMENT", "text"),
    (request([1] * 2_000_000), "INVALID_ARGUMENT", "token_ids.ids"),
    (router_pb2.GenerateRequest(model="emulated"), "INVALID_ARGUMENT", "prompt"),
    (router_pb2.GenerateRequest(model="emulated", text="x", client_request_id="x" * 257),
     "INVALID_ARGUMENT", "client_request_id"),
    (router_pb2.GenerateRequest(model="emulated", text="x", transfer_mode=9),  # type: ignore[arg-type]
     "INVALID_ARGUMENT", "transfer_mode"),
    (router_pb2.GenerateRequest(model="emulated", chat={"messages": []}),
     "INVALID_ARGUMENT", "chat.messages"),
]  # fmt: skip


async def test_bad_requests_name_their_field_and_leave_nothing(cluster: RouterCluster) -> None:
    before = await counters(cluster)
    for bad, code, field in BAD:
        error = (await cluster.ask(bad)).error
        assert error is not None, field
        assert (error.code().name, (error.details() or "").partition(": ")[0]) == (code, field)
    assert await counters(cluster) == before
    await cluster.until_free()


@pytest.mark.parametrize("message", [b"\x12\x02\xff\xfe", b"\x12\x7f", b"\xff" * 9])
async def test_undecodable_messages_are_invalid_and_not_internal(
    cluster: RouterCluster, message: bytes
) -> None:
    call = cluster.channel.unary_stream("/splitwise.v1.Router/Generate")(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in (caught.value.details() or "")


async def test_the_models_limit_is_reached_exactly(cluster: RouterCluster) -> None:
    prompt = [1] * (LIMIT - 3)
    answer = await cluster.ask(request(prompt, max_tokens=3))
    assert answer.ids == expected(3, prompt)
    assert (await cluster.ask(request([1] * (LIMIT - 1)))).finished.output_tokens == 1  # no max_tokens


async def test_client_gone_after_the_first_token(cluster: RouterCluster) -> None:
    before = (await counters(cluster)).cancelled
    async for _ in cluster.stream(request(max_tokens=5000)):
        break
    cancelled = await cluster.until_free()
    assert cancelled.counters.cancelled == before + 1


async def test_a_deadline_ends_a_request_everywhere(cluster: RouterCluster) -> None:
    answer = await cluster.ask(request(max_tokens=7000), timeout=1.0)
    assert answer.error is not None
    assert answer.error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert answer.ids == expected(7000)[: len(answer.ids)]
    await cluster.until_free()


async def test_a_slow_reader_gets_everything(cluster: RouterCluster) -> None:
    answer = Answer()
    async for message in cluster.stream(request(max_tokens=400)):
        answer.add(message)
        await asyncio.sleep(0.2 if len(answer.ids) < 20 else 0)
    assert answer.ids == expected(400)
    assert answer.text == text_of(answer.ids)


async def test_two_hundred_requests_of_which_a_third_is_cancelled(cluster: RouterCluster) -> None:
    before = await counters(cluster)
    choose = random.Random(4)

    async def one(number: int) -> bool:
        length, count = choose.randrange(1, 300), choose.randrange(1, 40)
        leave_after = choose.randrange(count) if number % 3 == 0 else None
        answer = Answer()
        async for message in cluster.stream(request(PROMPT[:length], max_tokens=count)):
            if leave_after is not None and len(answer.ids) >= leave_after:
                return False
            answer.add(message)
        assert answer.ids == expected(count, PROMPT[:length])
        return True

    ended = await asyncio.gather(*(asyncio.wait_for(one(number), 120) for number in range(200)))
    after = (await cluster.until_free()).counters
    assert after.received - before.received == 200
    assert after.failed == before.failed
    over = [getattr(after, k) - getattr(before, k) for k in ("finished", "cancelled", "rejected")]
    assert sum(over) == 200
    assert over[0] >= sum(ended)


async def test_a_flood_is_served_or_refused_with_a_delay(cluster: RouterCluster) -> None:
    answers = await asyncio.gather(*(cluster.ask(request([7, 8], max_tokens=2)) for _ in range(1000)))
    served = [answer for answer in answers if answer.error is None]
    assert served
    assert all(answer.ids == expected(2, [7, 8]) for answer in served)
    for answer in answers:
        if answer.error is not None:
            assert answer.error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert answer.retry_after_ms > 0
    await cluster.until_free()


async def test_a_request_log_is_a_trace_without_contents(cluster: RouterCluster) -> None:
    finished = (await counters(cluster)).finished
    path = cluster.folder / "requests.jsonl"
    log = load_log(path)
    assert len(log.trace) == finished
    assert (log.measured["ttft"] > 0).all()
    lines = path.read_text()
    assert '"transport"' in lines
    assert "text" not in lines
    assert "token_ids" not in lines
