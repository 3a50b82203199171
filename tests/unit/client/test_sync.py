"""The threaded client against a real server."""

from __future__ import annotations

import threading
import time

import pytest
from typer.testing import CliRunner

from splitwise import errors
from splitwise.cli.main import app
from splitwise.client import Client, FinishReason, Message, TransferMode, never
from tests.support.scripted_router import ServerThread, eventually


@pytest.fixture
def client(server: ServerThread):
    with Client(server.address) as client:
        yield client


def test_iterating_gives_the_text_and_result_the_whole(client: Client):
    stream = client.generate("one two three", client_request_id="mine")
    assert list(stream) == ["one ", "two ", "three "]
    result = stream.result()
    assert result.text == "one two three "
    assert result.token_ids == (0, 1, 2)
    assert result.finish_reason is FinishReason.LENGTH
    assert (result.request_id, result.client_request_id) == ("r1", "mine")
    assert stream.request_id == "r1"


def test_result_alone_consumes_the_stream(client: Client):
    assert client.generate("one two").result().text == "one two "


def test_units_are_seconds_and_bytes(client: Client):
    result = client.generate("x").result()
    assert result.timing.ttft == pytest.approx(2.0)
    assert result.timing.second == pytest.approx(0.003)
    assert result.transfer is not None
    assert result.transfer.bytes == 4096
    assert result.transfer.hidden_share == pytest.approx(0.75)
    assert result.transfer.mode is TransferMode.LAYERWISE
    assert result.placement.token_machine == "t0"
    assert (result.restarts, result.cached_prompt_tokens) == (1, 3)


def test_logprobs_come_with_their_tokens(client: Client):
    chunks = list(client.generate("a b", logprobs=1).chunks())
    assert [chunk.logprobs[0].token_id for chunk in chunks if chunk.token_ids] == [0, 1]
    assert chunks[1].logprobs[0].top == {9: -1.0}


def test_every_option_reaches_the_server(client: Client, server: ServerThread):
    client.generate(
        "x",
        model="m",
        transfer_mode="serialized",
        max_tokens=1,
        min_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        min_p=0.125,
        stop=["a", b"\xff"],
        stop_token_ids=[4, 5],
        seed=-7,
        presence_penalty=-1,
        frequency_penalty=1,
        repetition_penalty=2,
        logprobs=3,
        ignore_eos=True,
        n=1,
        logit_bias={6: -100},
    ).result()
    request = server.router.requests[0]
    assert (request.model, request.transfer_mode) == ("m", 1)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k, sampling.seed) == (1, 2, -1, -7)
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.25, 0.125)
    assert list(sampling.stop) == [b"a", b"\xff"]
    assert list(sampling.stop_token_ids) == [4, 5]
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-1, 1, 2)
    assert (sampling.logprobs, sampling.ignore_eos, sampling.n) == (3, True, 1)
    assert dict(sampling.logit_bias) == {6: -100}


def test_options_left_out_stay_unset(client: Client, server: ServerThread):
    client.generate("x").result()
    assert not server.router.requests[0].sampling.ListFields()


def test_one_stop_string_is_not_taken_apart(client: Client, server: ServerThread):
    client.generate("x", stop="END").result()
    assert list(server.router.requests[0].sampling.stop) == [b"END"]


def test_tokens_and_chats_are_sent_as_such(client: Client, server: ServerThread):
    client.generate([1, 2, 3]).result()
    client.generate([]).result()
    client.chat([{"role": "user", "content": "hi"}, Message("assistant", "yo")]).result()
    tokens, nothing, chat = server.router.requests
    assert list(tokens.token_ids.ids) == [1, 2, 3]
    assert nothing.WhichOneof("prompt") == "token_ids"
    assert [(m.role, m.content) for m in chat.chat.messages] == [("user", "hi"), ("assistant", "yo")]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda c: c.generate("x", max_tokens=-1), "sampling.max_tokens"),
        (lambda c: c.generate("x", temperature="hot"), "sampling.temperature"),
        (lambda c: c.generate("x", stop=["ok", "\ud800"]), r"sampling.stop\[1\]"),
        (lambda c: c.generate("x", stop_token_ids=[1, -1]), r"sampling.stop_token_ids\[1\]"),
        (lambda c: c.generate("x", logit_bias={-1: 0.0}), r"sampling.logit_bias\[-1\]"),
        (lambda c: c.generate("\ud800"), "text"),
        (lambda c: c.generate([1, -5]), r"token_ids.ids\[1\]"),
        (lambda c: c.generate(["a"]), r"token_ids.ids\[0\]"),
        (lambda c: c.generate("x", transfer_mode="never"), "transfer_mode"),
        (lambda c: c.generate("x" * (64 * 2**20)), "prompt"),
        (lambda c: c.chat([]), "chat.messages"),
        (lambda c: c.chat([{"role": "user"}]), r"chat.messages\[0\]"),
        (lambda c: c.chat([{"role": "user", "content": 5}]), r"chat.messages\[0\].content"),
    ],
)
def test_what_cannot_be_sent_is_refused_here_by_name(client: Client, server: ServerThread, call, field):
    with pytest.raises(errors.InvalidRequestError, match=f"^{field}: ") as caught:
        call(client)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert not server.router.requests


def test_an_unknown_option_is_a_programming_error(client: Client):
    with pytest.raises(TypeError, match=r"max_token'; known: .*max_tokens"):
        client.generate("x", max_token=1)  # type: ignore[call-arg]


def test_six_megabytes_reach_the_router(client: Client, server: ServerThread):
    client.generate("x" * 6_000_000).result()
    assert len(server.router.requests[0].text) == 6_000_000


def test_leaving_the_loop_cancels(client: Client, server: ServerThread):
    stream = client.generate("endless")
    for _piece in stream:
        break
    assert eventually(lambda: server.router.running == 0)
    with pytest.raises(errors.CancelledError):
        stream.result()


def test_leaving_the_block_cancels(client: Client, server: ServerThread):
    with client.generate("endless") as stream:
        next(iter(stream.chunks()))
    assert eventually(lambda: server.router.running == 0)


def test_cancel_from_another_thread_ends_the_wait(client: Client, server: ServerThread):
    stream = client.generate("silent")
    assert eventually(lambda: server.router.running == 1)
    threading.Timer(0.1, stream.cancel).start()
    with pytest.raises(errors.CancelledError):
        stream.result()
    assert eventually(lambda: server.router.running == 0)


def test_cancel_after_the_end_changes_nothing(client: Client):
    with client.generate("one") as stream:
        assert stream.result().text == "one "
    assert stream.result().text == "one "


def test_a_deadline_ends_the_call_at_both_ends(client: Client, server: ServerThread):
    with pytest.raises(errors.DeadlineError):
        client.generate("silent", timeout=0.3).result()
    assert eventually(lambda: server.router.running == 0)


@pytest.mark.parametrize("kind", ["unavailable", "overloaded"])
def test_it_retries_before_the_first_message(client: Client, server: ServerThread, kind: str):
    assert client.generate(f"fail {kind} 2").result().text == f"fail {kind} 2 "
    assert len(server.router.requests) == 3


def test_it_waits_as_long_as_told(client: Client, server: ServerThread):
    server.router.retry_after = 0.7
    client.generate("fail overloaded 1").result()
    first, second = server.router.times
    assert second - first >= 0.7


def test_it_does_not_wait_past_the_deadline(client: Client, server: ServerThread):
    server.router.retry_after = 60
    began = time.monotonic()
    with pytest.raises(errors.OverloadedError) as caught:
        client.generate("fail overloaded 1", timeout=5).result()
    assert caught.value.retry_after == 60
    assert time.monotonic() - began < 5


def test_it_gives_up_in_the_end(client: Client, server: ServerThread):
    with pytest.raises(errors.UnavailableError, match="scripted"):
        client.generate("fail unavailable 99").result()
    assert len(server.router.requests) == 4


def test_it_does_not_retry_what_stays_wrong(client: Client, server: ServerThread):
    with pytest.raises(errors.InvalidRequestError):
        client.generate("fail invalid 1").result()
    assert len(server.router.requests) == 1


def test_it_never_retries_after_the_first_message(client: Client, server: ServerThread):
    stream = client.generate("break unavailable")
    pieces = []
    with pytest.raises(errors.UnavailableError, match="scripted break"):
        pieces.extend(piece for piece in stream)
    assert len(server.router.requests) == 1
    with pytest.raises(errors.UnavailableError, match="scripted break"):  # and says so again
        stream.result()


def test_a_policy_of_ones_own_counts(server: ServerThread):
    with Client(server.address, retry=never) as client, pytest.raises(errors.UnavailableError):
        client.generate("fail unavailable 1").result()
    assert len(server.router.requests) == 1


def test_a_stream_without_its_end_is_an_error(client: Client):
    with pytest.raises(errors.ServerError, match="without saying why"):
        client.generate("unfinished").result()


def test_other_statuses_have_their_classes(client: Client):
    with pytest.raises(errors.DataLossError):
        client.generate("fail data_loss 1").result()


def test_a_router_that_is_not_there_is_named(server: ServerThread):
    server_address = server.address.with_port(1)
    with (
        Client(server_address, retry=never) as client,
        pytest.raises(
            errors.UnavailableError, match=r"cannot reach the router at 127.0.0.1:1: is it running"
        ),
    ):
        client.models()


def test_operators_calls(client: Client, server: ServerThread):
    assert client.models()[0].name == "tiny"
    server.router.describe_failures = 2  # retried
    cluster = client.cluster()
    machine = cluster.machines[0]
    assert (machine.machine_id, machine.home_pool, machine.pool, machine.state) == (
        "p0",
        "prompt",
        "mixed",
        "borrowed",
    )
    assert (machine.kv_blocks_used, machine.kv_blocks, machine.report_age) == (5, 100, 1.5)
    assert (cluster.queued, cluster.running, cluster.counters["received"]) == (2, 1, 3)
    record = client.explain("r1")[0]
    assert (record.at, record.kind, record.candidates[0].pool) == (2.0, "assign", "prompt")
    seen = record.candidates[0]
    assert (seen.queue_tokens, seen.kv_blocks_used, seen.kv_blocks, seen.cached_tokens) == (12, 7, 100, 64)
    assert record.left_out == {"prompt": 31, "token": 0}
    told = CliRunner().invoke(app, ["explain", "r1", "--router", str(server.address)])
    assert told.exit_code == 0
    assert "2000.0 ms  assign  p0 -> t0  (jsq:prompt-pool)" in told.output
    assert "* p0  prompt pool, 12 tokens queued, 7/100 KV blocks, 64 tokens cached" in told.output
    assert "and 31 more machines" in told.output
    with pytest.raises(errors.NotFoundError, match="r9"):
        client.explain("r9")
    assert client.drain("p0") == "draining"
    assert client.drain("p0", undo=True) == "serving"
    assert server.router.drained == {"p0": False}


def test_ipv6(serve):
    server = serve("[::1]:0")
    with Client(str(server.address)) as client:
        assert str(server.address).startswith("[::1]:")
        assert client.generate("six").result().text == "six "
