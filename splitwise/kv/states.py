"""Where a transfer stands, and what moves it on: one table for each side.

Theory first. A transfer has two halves, one at each daemon, that share nothing but messages.
The *source* half owns the right to read the prompt engine's blocks; the *destination* half
owns the right to let the token engine's blocks be written. A half ends in a final state
only when that right is given back: no put in flight at the source, no writer left at the
destination. That is why each side has one state between "it is over" and "it has ended":

* source: STOPPING - no further put is posted; waits for those in flight.
* destination: REVOKING - waits for the source's word that it has stopped, or, when that does
  not come, for the memory to be fenced (replaced under the writer).

The source's way is PLANNED → GRANTED → PUSHING → FLUSHED → SIGNALLED → DONE; the
destination's PLANNED → GRANTED → SIGNALLED → DONE. Either may end CANCELLED, FAILED or
EXPIRED instead. A (state, input) pair that is not in the table is out of place: nothing
changes.
"""

from __future__ import annotations

from enum import Enum


class TransferState(Enum):
    """Shared by both halves; STOPPING and REVOKING each belong to one."""

    PLANNED = "planned"  # source: no grant yet; destination: the grant is on its way
    GRANTED = "granted"  # source: may put; destination: the source has the grant
    PUSHING = "pushing"
    FLUSHED = "flushed"  # all bytes are in the destination's memory
    SIGNALLED = "signalled"  # source: awaits the acknowledgement; destination: verifies
    STOPPING = "stopping"
    REVOKING = "revoking"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    EXPIRED = "expired"


class TransferInput(Enum):
    """What moves a half on."""

    GRANT = "grant"
    PUSH = "push"
    FLUSH = "flush"
    SIGNAL = "signal"
    ACKNOWLEDGE = "acknowledge"
    STOP = "stop"  # cancelled, failed or expired
    SETTLE = "settle"  # nothing is in flight any more


class End(Enum):
    """How a half that did not get through has ended."""

    CANCELLED = "cancelled"
    FAILED = "failed"
    EXPIRED = "expired"


FINAL = frozenset({TransferState.DONE, TransferState.CANCELLED, TransferState.FAILED, TransferState.EXPIRED})
STATE_OF_END = {
    End.CANCELLED: TransferState.CANCELLED,
    End.FAILED: TransferState.FAILED,
    End.EXPIRED: TransferState.EXPIRED,
}

_S, _I = TransferState, TransferInput
Table = dict[tuple[TransferState, TransferInput], TransferState]

# SETTLE leads to the final state that the half's `End` names.
SOURCE_TABLE: Table = {
    (_S.PLANNED, _I.GRANT): _S.GRANTED,
    (_S.GRANTED, _I.PUSH): _S.PUSHING,
    (_S.GRANTED, _I.FLUSH): _S.FLUSHED,  # the destination had every block cached
    (_S.PUSHING, _I.PUSH): _S.PUSHING,
    (_S.PUSHING, _I.FLUSH): _S.FLUSHED,
    (_S.FLUSHED, _I.PUSH): _S.PUSHING,  # the prompt was preempted and begins again
    (_S.FLUSHED, _I.SIGNAL): _S.SIGNALLED,
    (_S.SIGNALLED, _I.ACKNOWLEDGE): _S.DONE,
}
DESTINATION_TABLE: Table = {
    (_S.PLANNED, _I.GRANT): _S.GRANTED,
    (_S.PLANNED, _I.SIGNAL): _S.SIGNALLED,  # overtook the answer to the grant
    (_S.GRANTED, _I.SIGNAL): _S.SIGNALLED,
    (_S.SIGNALLED, _I.GRANT): _S.SIGNALLED,
    (_S.SIGNALLED, _I.ACKNOWLEDGE): _S.DONE,
}
for _open in (_S.PLANNED, _S.GRANTED, _S.PUSHING, _S.FLUSHED, _S.SIGNALLED):
    SOURCE_TABLE[_open, _I.STOP] = _S.STOPPING
for _open in (_S.PLANNED, _S.GRANTED, _S.SIGNALLED):
    DESTINATION_TABLE[_open, _I.STOP] = _S.REVOKING
