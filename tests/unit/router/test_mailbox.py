"""What waits for one client: when it goes, and in how many messages."""

from __future__ import annotations

import asyncio

import pytest

from services.router.mailbox import Mailbox
from splitwise.errors import UnavailableError
from splitwise.requests.answer import Piece
from splitwise.rpc.v1.router_pb2 import Finished

LONG = 3600.0


def piece(text: str) -> Piece:
    return Piece(text, [ord(character) for character in text], [], 0)


async def test_the_first_token_waits_for_nothing_and_later_ones_for_the_gap() -> None:
    mailbox = Mailbox(gap_s=LONG)
    mailbox.put(piece("a"))
    assert (await mailbox.take()).text == "a"
    taking = asyncio.create_task(mailbox.take())
    for text in "bcd":
        mailbox.put(piece(text))
        await asyncio.sleep(0)
    assert not taking.done()
    mailbox.finish(Finished(output_tokens=4))
    last = await taking
    assert (last.text, list(last.token_ids), last.finished.output_tokens) == ("bcd", [*b"bcd"], 4)


async def test_after_the_gap_all_that_came_goes_as_one() -> None:
    mailbox = Mailbox(gap_s=0.02)
    mailbox.put(piece("a"))
    await mailbox.take()
    mailbox.put(piece("b"))
    mailbox.put(piece("c"))
    assert (await mailbox.take()).text == "bc"
    mailbox.put(piece("d"))
    assert (await mailbox.take()).text == "d"


async def test_a_failure_does_not_wait_and_comes_after_the_tokens() -> None:
    mailbox = Mailbox(gap_s=LONG)
    mailbox.put(piece("a"))
    await mailbox.take()
    mailbox.put(piece("b"))
    mailbox.fail(UnavailableError("gone"))
    assert (await mailbox.take()).text == "b"
    with pytest.raises(UnavailableError):
        await mailbox.take()


async def test_without_a_gap_every_token_goes_at_once() -> None:
    mailbox = Mailbox()
    for text in "abc":
        mailbox.put(piece(text))
        assert (await mailbox.take()).text == text
