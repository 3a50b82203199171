"""What a request and a machine can be doing, and what moves them on: two tables.

The idea is h11's: behaviour that depends on what came before is written down as data.
`REQUEST_TABLE` and `MACHINE_TABLE` map (state, input) to the next state; a pair that is
not there is out of place, and the scheduler answers it with `Ignore` and changes nothing.

A request's life::

    ARRIVED ─▶ ASSIGNED ─▶ PROMPT_RUNNING ─▶ HANDING_OVER ─▶ TOKEN_RUNNING ─▶ FINISHED
        └─▶ QUEUED ─┘            any of these ─▶ RESTARTED ─▶ ASSIGNED or QUEUED again
    anywhere ─▶ FAILED, CANCELLED;   before any work ─▶ REJECTED

Two streams carry a request's events, one per machine, so their order is not that of the
work: the token machine may report the KV cache (or even tokens) before the prompt
machine's first token is seen. The table allows exactly these overtakings.

A machine's life::

    JOINING ─▶ SERVING ◀─▶ BORROWED        (BORROWED: serving in the mixed pool)
                  └──▶ DRAINING ◀──┘       any ─▶ LOST
"""

from __future__ import annotations

from enum import Enum


class _Word(Enum):
    """Members are single objects, so identity hashes them; Enum's own hash is slow in the tables."""

    __hash__ = object.__hash__


class RequestState(_Word):
    """Where a request stands. FINISHED, FAILED, REJECTED and CANCELLED are final."""

    ARRIVED = "arrived"
    QUEUED = "queued"  # waits in the scheduler for a machine
    ASSIGNED = "assigned"  # both machines have their command
    PROMPT_RUNNING = "prompt running"  # the prompt machine accepted it
    HANDING_OVER = "handing over"  # the first token is there, the KV cache not yet
    TOKEN_RUNNING = "token running"  # noqa: S105 - a state, not a secret
    RESTARTED = "restarted"  # an attempt was given up, the next one is being decided
    FINISHED = "finished"
    FAILED = "failed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"


class RequestInput(_Word):
    """What moves a request on: events, and the scheduler's own decisions."""

    PLACE = "place"
    PARK = "park"
    ACCEPT = "accept"
    FIRST_TOKEN = "first token"  # noqa: S105 - an event, not a secret
    KV_RECEIVED = "kv received"
    TOKENS = "tokens"
    FINISH = "finish"
    GIVE_UP = "give up"
    FAIL = "fail"
    REJECT = "reject"
    CANCEL = "cancel"


class MachineState(_Word):
    """Where a machine stands."""

    JOINING = "joining"
    SERVING = "serving"
    BORROWED = "borrowed"
    DRAINING = "draining"
    LOST = "lost"


class MachineInput(_Word):
    """What moves a machine on."""

    ADMIT = "admit"
    BORROW = "borrow"
    RETURN = "return"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    LOSE = "lose"


_S, _I = RequestState, RequestInput

REQUEST_TABLE: dict[tuple[RequestState, RequestInput], RequestState] = {
    (_S.ARRIVED, _I.PLACE): _S.ASSIGNED,
    (_S.ARRIVED, _I.PARK): _S.QUEUED,
    (_S.ARRIVED, _I.REJECT): _S.REJECTED,
    (_S.ARRIVED, _I.FAIL): _S.FAILED,
    (_S.QUEUED, _I.PLACE): _S.ASSIGNED,
    (_S.QUEUED, _I.FAIL): _S.FAILED,
    (_S.QUEUED, _I.CANCEL): _S.CANCELLED,
    (_S.RESTARTED, _I.PLACE): _S.ASSIGNED,
    (_S.RESTARTED, _I.PARK): _S.QUEUED,
    (_S.RESTARTED, _I.FAIL): _S.FAILED,
    (_S.RESTARTED, _I.FINISH): _S.FINISHED,  # every token had been made
    (_S.ASSIGNED, _I.ACCEPT): _S.PROMPT_RUNNING,
    (_S.ASSIGNED, _I.FIRST_TOKEN): _S.HANDING_OVER,
    (_S.ASSIGNED, _I.KV_RECEIVED): _S.TOKEN_RUNNING,
    (_S.ASSIGNED, _I.TOKENS): _S.TOKEN_RUNNING,
    (_S.PROMPT_RUNNING, _I.ACCEPT): _S.PROMPT_RUNNING,
    (_S.PROMPT_RUNNING, _I.FIRST_TOKEN): _S.HANDING_OVER,
    (_S.PROMPT_RUNNING, _I.KV_RECEIVED): _S.TOKEN_RUNNING,
    (_S.PROMPT_RUNNING, _I.TOKENS): _S.TOKEN_RUNNING,
    (_S.HANDING_OVER, _I.ACCEPT): _S.HANDING_OVER,
    (_S.HANDING_OVER, _I.KV_RECEIVED): _S.TOKEN_RUNNING,
    (_S.HANDING_OVER, _I.TOKENS): _S.TOKEN_RUNNING,
    (_S.TOKEN_RUNNING, _I.ACCEPT): _S.TOKEN_RUNNING,
    (_S.TOKEN_RUNNING, _I.FIRST_TOKEN): _S.TOKEN_RUNNING,
    (_S.TOKEN_RUNNING, _I.KV_RECEIVED): _S.TOKEN_RUNNING,
    (_S.TOKEN_RUNNING, _I.TOKENS): _S.TOKEN_RUNNING,
}
RUNNING_STATES = (_S.ASSIGNED, _S.PROMPT_RUNNING, _S.HANDING_OVER, _S.TOKEN_RUNNING)
for _running in RUNNING_STATES:
    REQUEST_TABLE[_running, _I.FINISH] = _S.FINISHED
    REQUEST_TABLE[_running, _I.GIVE_UP] = _S.RESTARTED
    REQUEST_TABLE[_running, _I.FAIL] = _S.FAILED
    REQUEST_TABLE[_running, _I.CANCEL] = _S.CANCELLED

_M, _N = MachineState, MachineInput

MACHINE_TABLE: dict[tuple[MachineState, MachineInput], MachineState] = {
    (_M.JOINING, _N.ADMIT): _M.SERVING,
    (_M.SERVING, _N.BORROW): _M.BORROWED,
    (_M.BORROWED, _N.RETURN): _M.SERVING,
    (_M.SERVING, _N.DRAIN): _M.DRAINING,
    (_M.BORROWED, _N.DRAIN): _M.DRAINING,
    (_M.DRAINING, _N.RETURN): _M.DRAINING,  # it goes home while it drains
    (_M.DRAINING, _N.UNDRAIN): _M.SERVING,
    (_M.JOINING, _N.LOSE): _M.LOST,
    (_M.SERVING, _N.LOSE): _M.LOST,
    (_M.BORROWED, _N.LOSE): _M.LOST,
    (_M.DRAINING, _N.LOSE): _M.LOST,
}
