"""Traces of real processes, taken by a real OTLP service: one for each request, whole, without prompts."""

from __future__ import annotations

import asyncio
import re
import secrets
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import TracerProvider

from splitwise.client import AsyncClient
from tests.services.gateway.live_cluster import ENVIRONMENT
from tests.services.router.cluster import PATIENCE, RouterCluster, request
from tests.services.telemetry.conftest import NODES
from tests.support.collector import Collector, ReceivedSpan, collecting
from tests.support.tables import code, rows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# What is where in a trace: a span's name, and its parent's.
TREE = {
    "request": None,
    "queue": "request",
    "attempt": "request",
    "prompt phase": "attempt",
    "token phase": "attempt",
    "KV receive": "token phase",
    "KV push": "KV receive",
    "hand-over": "KV push",
}


pytestmark = pytest.mark.asyncio(loop_scope="module")


class TracedCluster(RouterCluster):
    """A cluster and the collector that it sends its spans to."""

    collector: Collector

    async def ask_with(self, asked: Any, traceparent: str) -> Any:
        """Ask as a client that has a trace of its own; returns the summary."""
        call = self.stub.Generate(asked, metadata=(("traceparent", traceparent),), timeout=PATIENCE)
        async for message in call:
            if message.HasField("finished"):
                return message.finished
        raise AssertionError("the stream ended without a summary")

    async def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """Return the spans of one trace, once all that a whole request has are there."""

        def mine(seen: list[ReceivedSpan]) -> list[ReceivedSpan]:
            return [span for span in seen if span.trace_id == trace_id]

        await self.collector.until(lambda seen: {span.name for span in mine(seen)} >= TREE.keys())
        return mine(self.collector.spans)


@asynccontextmanager
async def tracing(folder: Path, ratio: str) -> AsyncIterator[TracedCluster]:
    """A cluster that is not started yet, beside a collector."""
    cluster = TracedCluster(folder)
    async with collecting() as cluster.collector:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ENVIRONMENT, "SPLITWISE_TELEMETRY__TRACES_ENDPOINT", cluster.collector.address)
            patch.setitem(ENVIRONMENT, "SPLITWISE_TELEMETRY__TRACES_RATIO", ratio)
            try:
                yield cluster
            finally:
                await cluster.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TracedCluster]:
    """Records what its clients want recorded, and nothing else."""
    async with tracing(tmp_path_factory.mktemp("traces"), ratio="0") as cluster:
        await cluster.start_router()
        await cluster.start_nodes(NODES)
        yield cluster


def new_parent(flags: str = "01") -> tuple[str, str, str]:
    """Return a client's trace id, span id and traceparent."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-{flags}"


async def test_one_trace_holds_the_whole_way_of_a_request(traced: TracedCluster) -> None:
    trace_id, client_span, traceparent = new_parent()
    finished = await traced.ask_with(request(max_tokens=5), traceparent)
    spans = await traced.trace(trace_id)
    found = {span.name: span for span in spans}
    assert found.keys() == TREE.keys()
    assert len(spans) == len(TREE)

    prompt, token = traced.machines
    where = {span.name: (span.service, span.instance) for span in spans}
    assert where == {
        "request": ("splitwise-router", "router"),
        "queue": ("splitwise-router", "router"),
        "attempt": ("splitwise-router", "router"),
        "prompt phase": ("splitwise-prompt", prompt),
        "token phase": ("splitwise-token", token),
        "KV receive": ("splitwise-kvd", "b"),
        "KV push": ("splitwise-kvd", "a"),
        "hand-over": ("splitwise-kvd", "a"),
    }
    for name, parent in TREE.items():
        assert found[name].parent_id == (found[parent].span_id if parent else client_span), name
        assert found[name].error == "", name
        assert found[name].began_ns <= found[name].ended_ns, name
    # One host, one wall clock: a child begins within its parent. Only the first token may be made
    # before the first put, when the prompt is short or the host busy.
    for name, parent in TREE.items():
        if parent and name != "hand-over":
            assert found[parent].began_ns <= found[name].began_ns <= found[parent].ended_ns, name

    request_span, push = found["request"].attributes, found["KV push"].attributes
    assert request_span["splitwise.prompt_tokens"] == 700
    assert request_span["splitwise.output_tokens"] == 5
    assert request_span["splitwise.outcome"] == "finished"
    assert found["attempt"].attributes["splitwise.prompt_machine"] == prompt
    assert found["attempt"].attributes["splitwise.token_machine"] == token
    assert push["splitwise.bytes"] == finished.transfer.bytes > 0
    assert push["splitwise.exposed_us"] == finished.transfer.exposed_us
    hidden = finished.transfer.push_us - finished.transfer.exposed_us
    assert push["splitwise.hidden_us"] == max(0, hidden)
    assert push["splitwise.transport"] == "ucx"
    assert [name for name, _ in found["attempt"].events] in (
        ["first token", "KV received"],
        ["KV received", "first token"],
    )
    assert found["prompt phase"].ended_ns <= found["token phase"].ended_ns


async def test_http_clients_are_traced_too(traced: TracedCluster) -> None:
    body = {"model": "emulated", "prompt": "good morning", "max_tokens": 3, "temperature": 0}
    trace_id, client_span, traceparent = new_parent()
    async with (
        aiohttp.ClientSession(headers={"traceparent": traceparent}) as http,
        http.post(f"{traced.http}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
    spans = {span.name: span for span in await traced.trace(trace_id)}
    assert spans["request"].parent_id == client_span


async def test_the_sdk_continues_its_callers_span(traced: TracedCluster) -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("caller")
    with tracer.start_as_current_span("page") as page:
        async with AsyncClient(traced.address) as client:
            answer = await client.generate(
                "good morning", max_tokens=3, temperature=0, ignore_eos=True
            ).result()
    assert answer.output_tokens == 3
    context = page.get_span_context()
    spans = {span.name: span for span in await traced.trace(f"{context.trace_id:032x}")}
    assert spans["request"].parent_id == f"{context.span_id:016x}"


async def test_no_prompt_and_no_output_is_in_what_is_sent(traced: TracedCluster) -> None:
    trace_id, _, traceparent = new_parent()
    await traced.ask_with(
        request("the password is swordfish " * 30, stop=[b"halibut"], max_tokens=8), traceparent
    )
    await traced.trace(trace_id)
    sent = b"".join(traced.collector.raw)
    assert b"prompt phase" in sent
    assert b"swordfish" not in sent
    assert b"halibut" not in sent
    # Sizes, times, ids and words of ours: no attribute is long.
    for span in traced.collector.spans:
        for attributes in (span.attributes, *(of for _, of in span.events)):
            for key, value in attributes.items():
                assert re.fullmatch(r"splitwise\.[a-z_]+", key)
                assert len(str(value)) <= 64, (span.name, key)


async def test_what_is_not_sampled_is_recorded_nowhere(traced: TracedCluster) -> None:
    assert (await traced.ask(request(max_tokens=3))).finished is not None  # the ratio is 0
    unsampled, _, quiet = new_parent(flags="00")
    await traced.ask_with(request(max_tokens=3), quiet)
    sampled, _, loud = new_parent()
    await traced.ask_with(request(max_tokens=3), loud)
    await traced.trace(sampled)
    with_client = {span.parent_id for span in traced.collector.named("request")}
    assert "" not in with_client
    assert unsampled not in {span.trace_id for span in traced.collector.spans}


@pytest.mark.slow
async def test_a_restart_is_one_trace_with_both_attempts_and_says_why(tmp_path: Path) -> None:
    async with tracing(tmp_path, ratio="1") as cluster:
        await cluster.start_router()
        await cluster.start_nodes({"a": ["1xH100:prompt"], "b": ["2xH100:token"]}, b={"time_scale": 1.0})
        # A malformed traceparent is as good as none: the router begins the trace.
        call = cluster.stub.Generate(
            request(max_tokens=60, ignore_eos=True), metadata=(("traceparent", "00-x"),), timeout=PATIENCE
        )
        killed, made = "", 0
        async for message in call:
            made += len(message.token_ids)
            if made >= 5 and not killed:
                [killed] = [
                    machine.description.identity.machine_id
                    for machine in (await cluster.describe()).machines
                    if machine.pending_token_requests
                ]
                await cluster.signal_machine(killed)
        assert made == 60
        await cluster.collector.until(lambda seen: any(span.name == "request" for span in seen))
        [whole] = cluster.collector.named("request")
        spans = await cluster.trace(whole.trace_id)
        assert whole.parent_id == ""
        assert ("restart", {"splitwise.reason": "machine:lost"}) in whole.events
        assert whole.attributes["splitwise.restarts"] == 1
        first, second = sorted((s for s in spans if s.name == "attempt"), key=lambda s: s.began_ns)
        assert (first.error, second.error) == ("machine:lost", "")
        assert first.attributes["splitwise.token_machine"] == killed
        assert first.parent_id == second.parent_id == whole.span_id
        # The killed machine could not send its span; the others' are there for both attempts.
        prompts = [span.parent_id for span in spans if span.name == "prompt phase"]
        assert sorted(prompts) == sorted([first.span_id, second.span_id])
        assert [span.parent_id for span in spans if span.name == "token phase"] == [second.span_id]
        assert [span.parent_id for span in spans if span.name == "queue"] == [whole.span_id] * 2


@pytest.mark.slow
async def test_a_collector_that_is_away_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "SPLITWISE_TELEMETRY__TRACES_ENDPOINT", "http://127.0.0.1:9")
    cluster = RouterCluster(tmp_path)
    try:
        await cluster.start_router()
        await cluster.start_nodes(NODES)
        for _ in range(3):
            assert (await cluster.ask(request(max_tokens=3))).finished is not None
        async with asyncio.timeout(PATIENCE):
            codes = [await process.stop() for process in reversed(cluster._started)]
        assert codes == [0] * len(codes)
    finally:
        await cluster.stop()


async def test_the_guide_lists_every_span_with_its_parent() -> None:
    table = {code(row["span"]): row["parent"] for row in rows("telemetry.md", "span")}
    assert table.keys() == TREE.keys()
    for name, parent in TREE.items():
        assert table[name] == (f"`{parent}`" if parent else "the client's, if it sent one"), name
