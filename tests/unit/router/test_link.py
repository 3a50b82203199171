"""Commands on their way to a machine: in order, in few messages, each of them small."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.router import link
from services.router.link import together
from splitwise.rpc.v1.machine_pb2 import CancelWork, PromptCommand, StartPrompt, WorkRef


def start(number: int, tokens: int) -> PromptCommand:
    work = WorkRef(request_id=f"r{number}", attempt=1)
    if tokens == 0:
        return PromptCommand(cancel=CancelWork(work=work, reason="gone"))
    return PromptCommand(start=StartPrompt(work=work, token_ids=[70_000] * tokens))


def name(command: PromptCommand) -> str:
    return (command.start.work if command.HasField("start") else command.cancel.work).request_id


@given(st.lists(st.sampled_from([0, 1, 10, 300, 1000]), max_size=40))
def test_all_commands_arrive_in_order_and_messages_are_bounded(sizes: list[int]) -> None:
    bound, link.TOGETHER_BYTES = link.TOGETHER_BYTES, 2000
    try:
        messages = list(together([start(number, tokens) for number, tokens in enumerate(sizes)]))
    finally:
        link.TOGETHER_BYTES = bound
    unpacked = [command for message in messages for command in (message, *message.more)]
    assert [name(command) for command in unpacked] == [f"r{number}" for number in range(len(sizes))]
    for message in messages:
        assert not message.more or sum(one.ByteSize() for one in message.more) <= 2000
    assert all(not further.more for message in messages for further in message.more)


def test_what_is_queued_together_goes_together() -> None:
    assert len(list(together([start(number, 16) for number in range(64)]))) == 1
    assert list(together([])) == []
