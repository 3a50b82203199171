"""The dispatcher and a real scheduler; only the network ends of the links are left out."""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from services.router.dispatcher import Dispatcher
from services.router.journal import Journal
from services.router.session import Admitted
from splitwise.config import RouterSettings
from splitwise.errors import InvalidRequestError, OverloadedError, UnavailableError
from splitwise.requests import complete_sampling
from splitwise.rpc.v1 import machine_pb2 as pb
from splitwise.rpc.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    TRANSFER_MODE_LAYERWISE,
    TRANSFER_MODE_SERIALIZED,
    TRANSFER_MODE_UNSPECIFIED,
    MachineDescription,
    MachineIdentity,
    SamplingParams,
    TransferStats,
)
from splitwise.scheduling.events import MachineSpec, Phase, Pool
from splitwise.scheduling.settings import SchedulerSettings
from splitwise.text import ByteVocabulary

if TYPE_CHECKING:
    from services.router.session import Session
    from splitwise.rpc.v1.router_pb2 import GenerateResponse


class Link:
    """Keeps the commands that a `MachineLink` would write to its streams."""

    def __init__(self, name: str) -> None:
        self.description = MachineDescription(
            identity=MachineIdentity(machine_id=name, incarnation=1), kvd_address="kvd:1", engine_id=name
        )
        self.load: Any = None
        self.load_at = self.heard_at = 0.0
        self.accepted_serial = 0
        self.prompts: list[pb.StartPrompt] = []
        self.tokens: list[pb.StartToken] = []
        self.cancelled: list[tuple[Phase, str, int]] = []
        self.power: list[pb.PowerOrder] = []

    def start_prompt(self, start: pb.StartPrompt) -> None:
        self.prompts.append(start)

    def start_token(self, start: pb.StartToken) -> None:
        self.tokens.append(start)

    def cancel(self, phase: Phase, cancel: pb.CancelWork) -> None:
        self.cancelled.append((phase, cancel.work.request_id, cancel.work.attempt))

    def order_power(self, order: pb.PowerOrder) -> None:
        self.power.append(order)


class Cluster:
    """Two prompt and two token machines, unless told otherwise."""

    def __init__(self, names: str = "p1 p2 t1 t2", **settings: Any) -> None:
        self.dispatcher = Dispatcher(RouterSettings(), SchedulerSettings(**settings))
        self.links: dict[str, Link] = {}
        for name in names.split():
            self.add(name)

    def add(self, name: str) -> None:
        link = self.links[name] = Link(name)
        home = Pool.PROMPT if name[0] == "p" else Pool.TOKEN
        spec = MachineSpec(name, 1, home, "m", "f", "node", 1000, 16, 64)
        assert self.dispatcher.join(link, spec) is None  # type: ignore[arg-type]

    def submit(self, *stops: str, prompt: int | list[int] = 20, **sampling: Any) -> Session:
        params = complete_sampling(SamplingParams(**sampling), room=50)
        text, now = ByteVocabulary().detokenizer(), time.monotonic()
        ids = [1] * prompt if isinstance(prompt, int) else prompt
        admitted = Admitted("m", "", ids, params, list(stops), text, 0, None, now)
        return self.dispatcher.submit(admitted, 16)

    def pair(self, session: Session) -> tuple[Link, Link]:
        placement = session.placement
        assert placement is not None
        return self.links[placement.prompt_machine], self.links[placement.token_machine]

    def lose(self, link: Link) -> None:
        self.dispatcher.lose(link, "killed")  # type: ignore[arg-type]

    def tell(self, link: Link, phase: Phase, **event: Any) -> None:
        batch = pb.MachineEvents(events=[pb.MachineEvent(**event)])
        self.dispatcher.take(link, phase, batch)  # type: ignore[arg-type]

    def first(self, session: Session, token: int, finish: int = 0, attempt: int | None = None) -> None:
        tokens = pb.Tokens(work=ref(session, attempt), ids=[token], finish=finish)  # type: ignore[arg-type]
        self.tell(self.pair(session)[0], Phase.PROMPT, tokens=tokens)

    def later(self, session: Session, ids: bytes, finish: int = 0, attempt: int | None = None) -> None:
        tokens = pb.Tokens(work=ref(session, attempt), ids=list(ids), finish=finish)  # type: ignore[arg-type]
        self.tell(self.pair(session)[1], Phase.TOKEN, tokens=tokens)

    def received(self, session: Session) -> None:
        received = pb.KvReceived(work=ref(session), stats=TransferStats(bytes=7))
        self.tell(self.pair(session)[1], Phase.TOKEN, kv_received=received)

    def failed(self, session: Session, phase: Phase, cause: int, message: str = "it broke") -> None:
        failed = pb.WorkFailed(work=ref(session), cause=cause, message=message)  # type: ignore[arg-type]
        self.tell(self.pair(session)[phase is Phase.TOKEN], phase, failed=failed)


def ref(session: Session, attempt: int | None = None) -> pb.WorkRef:
    return pb.WorkRef(request_id=session.request_id, attempt=attempt or session.attempt)


async def answer(session: Session) -> GenerateResponse:
    return await session.mailbox.take()


def test_a_push_is_in_flight_until_it_has_arrived_or_its_attempt_is_given_up() -> None:
    cluster = Cluster()
    short, long = cluster.submit(max_tokens=3), cluster.submit(max_tokens=3, prompt=600)
    assert (short.pushing, long.pushing) == (TRANSFER_MODE_SERIALIZED, TRANSFER_MODE_LAYERWISE)
    assert cluster.submit(max_tokens=1).pushing == TRANSFER_MODE_UNSPECIFIED  # there is no token phase
    cluster.first(long, ord("a"))
    assert long.pushing == TRANSFER_MODE_LAYERWISE
    cluster.received(long)
    assert long.pushing == TRANSFER_MODE_UNSPECIFIED
    attempt = short.attempt
    cluster.lose(cluster.pair(short)[0])
    assert (short.attempt, short.pushing) == (attempt + 1, TRANSFER_MODE_SERIALIZED)  # anew, elsewhere


async def test_a_request_through_both_machines() -> None:
    cluster = Cluster()
    session = cluster.submit(max_tokens=3, seed=5)
    prompt, token = cluster.pair(session)
    (start,), (later,) = prompt.prompts, token.tokens
    assert start.transfer == later.transfer
    assert len(start.transfer.transfer_id) == 16
    assert start.token_ids == later.token_ids == [1] * 20
    assert (later.source_kvd_address, later.source_engine_id) == ("kvd:1", prompt.description.engine_id)
    assert (start.sampling.seed, start.sampling.seed == later.sampling.seed) == (5, False)
    cluster.first(session, ord("a"), FINISH_REASON_LENGTH)
    assert (await answer(session)).text == "a"  # at once
    cluster.received(session)
    cluster.later(session, b"bc", FINISH_REASON_LENGTH)
    last = await answer(session)
    assert (last.text, last.finished.output_tokens, last.finished.transfer.bytes) == ("bc", 3, 7)
    assert last.finished.reason == FINISH_REASON_LENGTH
    assert not cluster.dispatcher.sessions
    assert cluster.dispatcher.scheduler.open_requests == 0
    assert cluster.dispatcher.counters.finished == 1
    assert not token.cancelled


async def test_one_token_needs_no_token_machine() -> None:
    cluster = Cluster()
    session = cluster.submit(max_tokens=1)
    assert not any(link.tokens for link in cluster.links.values())
    assert not cluster.pair(session)[0].prompts[0].HasField("transfer")
    cluster.first(session, ord("a"))
    message = await answer(session)
    assert (message.text, message.finished.reason) == ("a", FINISH_REASON_LENGTH)
    assert not cluster.dispatcher.sessions


@pytest.mark.parametrize("ends_by", ["eos", "stop string"])
async def test_a_first_token_that_ends_the_request_frees_both_machines(ends_by: str) -> None:
    cluster = Cluster()
    session = cluster.submit(*(["a"] if ends_by == "stop string" else []), max_tokens=9)
    prompt, token = cluster.pair(session)
    cluster.first(session, ord("a"), FINISH_REASON_STOP if ends_by == "eos" else 0)
    message = await answer(session)
    assert (message.text, message.finished.reason) == ("", FINISH_REASON_STOP)
    assert token.cancelled == [(Phase.TOKEN, session.request_id, 1)]
    assert prompt.cancelled == [(Phase.PROMPT, session.request_id, 1)]
    assert not cluster.dispatcher.sessions


async def test_a_stop_string_across_the_hand_over_stops_the_token_machine() -> None:
    cluster = Cluster()
    session = cluster.submit("ab", max_tokens=9)
    _, token = cluster.pair(session)
    cluster.first(session, ord("a"))
    cluster.received(session)
    cluster.later(session, b"bc")
    message = await answer(session)
    assert (message.text, message.finished.stop_matched) == ("", "ab")
    assert [phase for phase, _, _ in token.cancelled] == [Phase.TOKEN]
    assert not cluster.dispatcher.sessions


async def test_a_token_machine_lost_while_streaming_is_not_seen() -> None:
    cluster = Cluster()
    session = cluster.submit(max_tokens=6, min_tokens=4)
    _, token = cluster.pair(session)
    cluster.first(session, ord("a"))
    cluster.received(session)
    cluster.later(session, b"bc")
    cluster.lose(token)
    again = cluster.pair(session)
    assert token not in again
    assert session.attempt == 2
    start = again[0].prompts[-1]
    assert list(start.token_ids) == [1] * 20 + [*b"abc"]
    assert (start.sampling.max_tokens, start.sampling.min_tokens) == (3, 1)
    assert start.transfer.transfer_id != token.tokens[0].transfer.transfer_id
    cluster.later(session, b"XX", attempt=1)  # of the attempt that was given up
    cluster.first(session, ord("d"))
    cluster.later(session, b"ef", FINISH_REASON_LENGTH)
    message = await answer(session)
    assert (message.text, message.finished.restarts) == ("abcdef", 1)
    assert cluster.dispatcher.counters.restarted == 1


async def test_a_prompt_machine_lost_before_its_first_token_was_seen() -> None:
    """The token machine has all and even goes on, but nobody knows the first token."""
    cluster = Cluster()
    session = cluster.submit(max_tokens=4)
    prompt, token = cluster.pair(session)
    cluster.received(session)
    cluster.later(session, b"b")
    cluster.lose(prompt)
    assert session.attempt == 2
    assert (Phase.TOKEN, session.request_id, 1) in token.cancelled
    cluster.first(session, ord("a"))
    cluster.later(session, b"bcd", FINISH_REASON_LENGTH)
    assert (await answer(session)).text == "abcd"


async def test_a_prompt_machine_lost_after_the_hand_over_is_not_missed() -> None:
    cluster = Cluster()
    session = cluster.submit(max_tokens=3)
    prompt, _ = cluster.pair(session)
    cluster.first(session, ord("a"))
    cluster.received(session)
    cluster.lose(prompt)
    assert session.attempt == 1
    cluster.later(session, b"bc", FINISH_REASON_LENGTH)
    assert (await answer(session)).text == "abc"


async def test_tokens_that_overtake_the_first_wait_for_it() -> None:
    cluster = Cluster()
    session = cluster.submit(max_tokens=3)
    cluster.later(session, b"bc", FINISH_REASON_LENGTH)
    cluster.first(session, ord("a"))
    message = await answer(session)
    assert (message.text, message.finished.output_tokens) == ("abc", 3)
    assert not cluster.dispatcher.sessions


async def test_penalties_fail_instead_of_being_wrong() -> None:
    cluster = Cluster()
    session = cluster.submit(max_tokens=9, presence_penalty=1)
    cluster.first(session, ord("a"))
    cluster.received(session)
    cluster.lose(cluster.pair(session)[1])
    assert (await answer(session)).text == "a"
    with pytest.raises(UnavailableError, match="presence_penalty"):
        await answer(session)
    assert not cluster.dispatcher.sessions
    assert cluster.dispatcher.counters.failed == 1
    assert all(not link.prompts[1:] for link in cluster.links.values())


async def test_too_many_failures_end_in_an_error() -> None:
    cluster = Cluster(max_attempts=2)
    session = cluster.submit(max_tokens=9)
    for _ in range(2):
        cluster.failed(session, Phase.TOKEN, pb.FAILURE_CAUSE_TRANSFER)
    with pytest.raises(UnavailableError, match="it broke"):
        await answer(session)
    assert cluster.dispatcher.counters.failed == 1


async def test_what_the_engine_refuses_for_good_is_not_tried_again() -> None:
    cluster = Cluster()
    session = cluster.submit(max_tokens=9)
    _, token = cluster.pair(session)
    cluster.failed(session, Phase.PROMPT, pb.FAILURE_CAUSE_INVALID, "sampling.logit_bias: not here")
    with pytest.raises(InvalidRequestError, match=r"sampling\.logit_bias"):
        await answer(session)
    assert [phase for phase, _, _ in token.cancelled] == [Phase.TOKEN]


async def test_leaving_cancels_both_sides_once() -> None:
    cluster = Cluster()
    session = cluster.submit(max_tokens=9)
    prompt, token = cluster.pair(session)
    for _ in range(2):
        cluster.dispatcher.leave(session)
    assert [phase for phase, _, _ in prompt.cancelled] == [Phase.PROMPT]
    assert [phase for phase, _, _ in token.cancelled] == [Phase.TOKEN]
    cluster.failed(session, Phase.TOKEN, pb.FAILURE_CAUSE_CANCELLED)
    assert cluster.dispatcher.counters.cancelled == 1
    assert cluster.dispatcher.counters.failed == 0


async def test_without_machines_and_beyond_the_queue() -> None:
    with pytest.raises(UnavailableError) as nobody:
        await answer(Cluster("").submit())
    assert nobody.value.retry_after
    cluster = Cluster("p1 t1", max_queued=3, queue_tokens=20, last_resort_tokens=20)
    sessions = [cluster.submit(max_tokens=9) for _ in range(9)]
    rejected = [session for session in sessions if session.outcome == "rejected"]
    assert rejected
    assert cluster.dispatcher.counters.rejected == len(rejected)
    with pytest.raises(OverloadedError) as full:
        await answer(rejected[0])
    assert full.value.retry_after
    assert sum(len(link.prompts) for link in cluster.links.values()) == 9 - len(rejected) - 3


async def test_a_client_that_does_not_read_is_given_up() -> None:
    cluster = Cluster()
    session = cluster.submit(max_tokens=9)
    session.mailbox._max_unread = 2
    cluster.first(session, ord("a"))
    cluster.later(session, b"bcd")
    assert (await answer(session)).text == "abcd"
    with pytest.raises(OverloadedError, match="slowly"):
        await answer(session)
    assert not cluster.dispatcher.sessions


async def test_why_it_ran_there_can_be_asked_and_is_forgotten_in_time() -> None:
    cluster = Cluster()
    session = cluster.submit(max_tokens=2)
    first = session.placement
    assert first is not None
    cluster.lose(cluster.pair(session)[1])
    explained = cluster.dispatcher.journal.explain(session.request_id)
    assert explained is not None
    assert [record.kind for record in explained.decisions if record.kind != "cancel"] == [
        "assign", "restart", "assign",
    ]  # fmt: skip
    chosen = {seen.machine_id for seen in explained.decisions[0].candidates if seen.chosen}
    assert chosen == {first.prompt_machine, first.token_machine}
    weighed = explained.decisions[0].candidates
    assert {seen.machine_id for seen in weighed} == {"p1", "p2", "t1", "t2"}
    assert all((seen.queue_tokens, seen.kv_blocks_used, seen.kv_blocks) == (0, 0, 1000) for seen in weighed)
    again = {seen.machine_id for seen in explained.decisions[-1].candidates}
    assert again == {"p1", "p2", "t1", "t2"} - {first.prompt_machine, first.token_machine}
    journal = cluster.dispatcher.journal
    for number in range(25_000):
        journal.arrived(f"r{number}", 0.0)
    assert journal.explain(session.request_id) is None
    assert journal.explain("r24999") is not None
    assert len(journal._entries) <= 20_000


def test_prompts_that_are_all_different_fill_no_memory() -> None:
    """What is kept of requests that are over has bounds; after they are reached nothing grows."""
    cluster = Cluster("p1 t1", policy="prefix-aware", prefix_blocks_per_machine=64)
    cluster.dispatcher.journal = Journal(max_requests=200, max_entries=1000)

    serial = itertools.count()

    def run(count: int) -> int:
        for number in itertools.islice(serial, count):
            session = cluster.submit(max_tokens=2, prompt=[number, *range(63)])
            cluster.first(session, ord("a"))
            cluster.received(session)
            cluster.later(session, b"b", FINISH_REASON_LENGTH)
        for link in cluster.links.values():
            for kept in (link.prompts, link.tokens, link.cancelled):
                kept.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        filled = run(600)
        grown = run(1800) - filled
    finally:
        tracemalloc.stop()
    assert not cluster.dispatcher.sessions
    assert grown < 200_000  # 1,800 requests; one that was kept whole would take some thousand bytes
