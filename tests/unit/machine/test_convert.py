"""Commands of the control streams as work: what is missing is named."""

from __future__ import annotations

import pytest

from services.machine.convert import prompt_work
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE, TRANSFER_MODE_SERIALIZED, TransferRef
from splitwise.rpc.v1.machine_pb2 import StartPrompt, WorkRef

WORK = WorkRef(request_id="r", attempt=1)
REF = TransferRef(transfer_id=bytes(16), generation=1)


@pytest.mark.parametrize("mode", [TRANSFER_MODE_SERIALIZED, TRANSFER_MODE_LAYERWISE])
def test_the_routers_choice_of_mode_reaches_the_engine(mode: int) -> None:
    start = StartPrompt(work=WORK, token_ids=[1], transfer=REF, mode=mode)  # type: ignore[arg-type]
    assert prompt_work(start).mode == mode


@pytest.mark.parametrize(
    ("start", "named"),
    [
        (StartPrompt(work=WORK, token_ids=[1], transfer=REF), "mode"),
        (StartPrompt(work=WORK, token_ids=[1], transfer=TransferRef(transfer_id=b"x")), "transfer"),
        (StartPrompt(work=WORK), "token_ids"),
    ],
)
def test_what_cannot_be_run_is_named(start: StartPrompt, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}:"):
        prompt_work(start)


def test_without_a_transfer_no_mode_is_needed() -> None:
    assert prompt_work(StartPrompt(work=WORK, token_ids=[1])).transfer is None
