"""What comes too late, from whoever is gone, changes nothing and leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.dispatcher import Dispatcher
from services.router.mailbox import Mailbox
from services.router.models import Models
from services.router.registry import Registry
from splitwise.config import RouterSettings, TlsSettings
from splitwise.errors import OverloadedError, RemoteError
from splitwise.requests.answer import Piece
from splitwise.rpc.v1 import machine_pb2 as pb
from splitwise.rpc.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    POOL_TOKEN,
    LoadReport,
    MachineDescription,
    MachineIdentity,
)
from splitwise.scheduling.events import Phase
from splitwise.scheduling.settings import SchedulerSettings
from tests.unit.router.test_dispatcher import Cluster, ref

if TYPE_CHECKING:
    from services.router.session import Session


def tokens(session: Session, ids: bytes, finish: int = 0, attempt: int = 0) -> dict[str, Any]:
    work = ref(session, attempt or None)
    return {"tokens": pb.Tokens(work=work, ids=list(ids), finish=finish)}  # type: ignore[arg-type]


async def test_tokens_of_a_lost_link_are_nobodys_even_while_the_request_waits() -> None:
    """Its only pair is gone and another machine not there yet: the attempt's number is still the old one."""
    cluster = Cluster("p1 t1 t2", queue_tokens=20, last_resort_tokens=20)
    session = cluster.submit(max_tokens=9)
    _, token = cluster.pair(session)
    cluster.first(session, ord("a"))
    cluster.received(session)
    cluster.lose(token)
    cluster.tell(token, Phase.TOKEN, **tokens(session, b"XX", FINISH_REASON_LENGTH, attempt=1))
    cluster.tell(token, Phase.TOKEN, **tokens(session, b"XX", FINISH_REASON_LENGTH))
    assert session.progress.made == [ord("a")]
    assert not session.answered
    cluster.first(session, ord("b"))
    cluster.later(session, b"cdefghi", FINISH_REASON_LENGTH)
    assert (await session.mailbox.take()).text == "abcdefghi"


async def test_a_failed_sides_partner_adds_nothing_to_a_request_that_waits() -> None:
    cluster = Cluster("p1 t1", queue_tokens=20, last_resort_tokens=20)
    session = cluster.submit(max_tokens=2)
    for _ in range(2):  # then both machines are set aside, and nobody can take it
        prompt, _ = cluster.pair(session)
        cluster.failed(session, Phase.TOKEN, pb.FAILURE_CAUSE_ENGINE)
    assert cluster.dispatcher.scheduler.queued == 1
    cluster.tell(prompt, Phase.PROMPT, **tokens(session, b"a", attempt=2))
    assert session.progress.made == []
    cluster.add("t2")
    assert session.attempt == 3
    cluster.first(session, ord("a"))
    cluster.later(session, b"b", FINISH_REASON_LENGTH)
    assert (await session.mailbox.take()).text == "ab"
    assert not cluster.dispatcher.sessions


@given(st.permutations(["first", "received", "later", "last"]), st.integers(0, 4), st.booleans())
def test_any_order_of_events_and_any_loss_gives_the_text_once(
    order: list[str], lose_at: int, lose_token: bool
) -> None:
    """The token stream keeps its own order; the first token and a loss come anywhere in it."""
    if order.index("later") > order.index("last"):
        order = [{"later": "last", "last": "later"}.get(kind, kind) for kind in order]
    asyncio.run(play(order, lose_at, lose_token))


async def play(order: list[str], lose_at: int, lose_token: bool) -> None:
    cluster = Cluster("p1 p2 p3 t1 t2 t3")
    session = cluster.submit(max_tokens=5)
    prompt, token = cluster.pair(session)

    def happen(kind: str, through: Any, made: int) -> None:
        later = b"abcde"[made + 1 :]
        if kind == "first":
            cluster.tell(through[0], Phase.PROMPT, **tokens(session, b"abcde"[made : made + 1], attempt=1))
        elif kind == "received":
            received = pb.KvReceived(work=ref(session, 1))
            cluster.tell(through[1], Phase.TOKEN, kv_received=received)
        elif kind == "later":
            cluster.tell(through[1], Phase.TOKEN, **tokens(session, later[:2], attempt=1))
        else:
            end = tokens(session, later[2:], FINISH_REASON_LENGTH, attempt=1)
            cluster.tell(through[1], Phase.TOKEN, **end)

    for index, kind in enumerate(order):
        if index == lose_at:
            cluster.lose(token if lose_token else prompt)
        happen(kind, (prompt, token), 0)
    if not session.answered:
        made = len(session.progress.made)
        start = cluster.pair(session)[0].prompts[-1]
        assert list(start.token_ids) == [1] * 20 + [*b"abcde"[:made]]
        cluster.first(session, b"abcde"[made])
        if not session.answered:
            cluster.later(session, b"abcde"[made + 1 :], FINISH_REASON_LENGTH)
    text = ""
    while session.finished is None or len(text) < 5:
        text += (await session.mailbox.take()).text
    assert text == "abcde"
    assert not cluster.dispatcher.sessions
    assert cluster.dispatcher.scheduler.open_requests == 0
    assert cluster.dispatcher.counters.finished == 1


async def test_a_mailbox_keeps_nothing_after_its_end() -> None:
    mailbox = Mailbox(max_unread=1)
    assert mailbox.put(Piece("a", [1], [], 0))
    assert not mailbox.put(Piece("b", [2], [], 0))
    mailbox.fail(OverloadedError("slow"))
    for _ in range(100):
        mailbox.put(Piece("c", [3], [], 0))
    assert (await mailbox.take()).text == "ab"
    with pytest.raises(OverloadedError):
        await mailbox.take()


async def test_made_up_machines_leave_nothing_behind() -> None:
    settings = RouterSettings()
    dispatcher = Dispatcher(settings, SchedulerSettings())
    registry = Registry(settings, TlsSettings(), dispatcher, Models({}))
    numbers = itertools.count(1)

    def machine() -> MachineDescription:
        return MachineDescription(
            identity=MachineIdentity(machine_id=f"ghost-{next(numbers)}", incarnation=1),
            address="127.0.0.1:1", home_pool=POOL_TOKEN, model="m", kv_fingerprint="f", engine_id="e",
            kvd_address="127.0.0.1:2", max_model_len=1, kv_blocks=1, block_tokens=1, max_running=1,
        )  # fmt: skip

    registering = [registry.register(machine(), LoadReport()) for _ in range(20)]
    failures = await asyncio.gather(*registering, return_exceptions=True)
    assert all(isinstance(failure, RemoteError) for failure in failures), failures
    del failures, registering
    gc.collect()
    assert not registry._joining
    await registry.close()
    assert not registry._closing
    assert not dispatcher.links


async def test_a_models_limit_is_the_least_of_its_machines_and_a_lone_machines_own() -> None:
    models = Models({})

    def machine(limit: int) -> MachineDescription:
        return MachineDescription(model="m", max_model_len=limit, block_tokens=16, vocab_size=600)

    for limit, alone, least in ((100, True, 100), (50, False, 50), (80, False, 50), (200, True, 200)):
        read = await models.read(machine(limit))
        before = [model.max_model_len for model in models]
        assert [model.max_model_len for model in models] == before  # reading alone changes nothing
        models.learn(read, alone=alone)
        assert models.get("m").max_model_len == least
