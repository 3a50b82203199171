"""One client request inside the router, from admission to its last message."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.router.mailbox import Mailbox
from services.router.traces import NO_TRACE
from splitwise.requests import Answer, Arrived, AttemptMerge, Progress, RequestTiming
from splitwise.rpc.v1.common_pb2 import (
    TRANSFER_MODE_LAYERWISE,
    TRANSFER_MODE_SERIALIZED,
    TRANSFER_MODE_UNSPECIFIED,
    TransferMode,
    TransferRef,
    TransferStats,
)
from splitwise.rpc.v1.machine_pb2 import StartPrompt, StartToken, WorkRef
from splitwise.rpc.v1.router_pb2 import Finished, Placement
from splitwise.text import StopMatcher

if TYPE_CHECKING:
    from splitwise.errors import RemoteError
    from splitwise.requests import Piece
    from splitwise.rpc.v1.common_pb2 import MachineDescription, SamplingParams
    from splitwise.rpc.v1.machine_pb2 import Tokens
    from splitwise.scheduling.decisions import Assign
    from splitwise.scheduling.events import AttemptEvent
    from splitwise.text import Detokenizer


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that passed validation: token ids, completed sampling, text side."""

    model: str
    client_request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    stops: list[str]
    detokenizer: Detokenizer
    transfer_mode: TransferMode.ValueType
    deadline: float | None
    arrived: float
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Session:
    """State of one request. The dispatcher drives it; the client's call reads its mailbox."""

    def __init__(
        self, admitted: Admitted, serialized_below_tokens: int, *, message_gap_s: float = 0.0
    ) -> None:
        self.request_id = admitted.request_id
        self.admitted = admitted
        self.progress = Progress(admitted.token_ids, admitted.sampling)
        self.timing = RequestTiming(admitted.arrived)
        self.mailbox = Mailbox(gap_s=message_gap_s)
        self.trace = NO_TRACE
        self.attempt = 0
        self.deferred: list[AttemptEvent] = []  # the token side's, until the first token is seen
        self.outcome: str | None = None  # finished, failed, cancelled or rejected
        self.finished: Finished | None = None  # the summary that the client was sent
        self._serialized_below = serialized_below_tokens
        self._answer = Answer(
            admitted.detokenizer,
            StopMatcher(admitted.stops),
            min_tokens=admitted.sampling.min_tokens,
            max_tokens=admitted.sampling.max_tokens,
        )
        self._merge = AttemptMerge(single=False)
        self._assignment: Assign | None = None
        self._given_up = False
        self._cached_prompt_tokens = 0
        self._transfer: TransferStats | None = None
        self.pushing: TransferMode.ValueType = TRANSFER_MODE_UNSPECIFIED  # until the KV cache has arrived

    # -- attempts

    def begin(
        self, assignment: Assign, source: MachineDescription, lease_ms: int, now: float
    ) -> tuple[StartPrompt, StartToken | None]:
        """Start an attempt; returns the two machines' commands, only the first for one token.

        `source` is the prompt machine's. Raises `CannotContinueError`.
        """
        plan = self.progress.continuation()
        self.timing.assigned(now)
        self._assignment = assignment
        self._given_up = False
        self.attempt = assignment.attempt
        self.deferred.clear()
        self._merge = AttemptMerge(single=plan.single)
        self._transfer = None
        self.pushing = TRANSFER_MODE_UNSPECIFIED
        work = WorkRef(request_id=self.request_id, attempt=self.attempt)
        prompt = StartPrompt(
            work=work,
            token_ids=plan.token_ids,
            sampling=plan.prompt_sampling,
            destination_machine=assignment.token_machine,
            lease_ms=lease_ms,
        )
        if plan.single:
            return prompt, None
        transfer = TransferRef(transfer_id=os.urandom(16), generation=self.attempt)
        prompt.transfer.CopyFrom(transfer)
        prompt.mode = self.pushing = self._mode(len(plan.token_ids))
        token = StartToken(
            work=work,
            token_ids=plan.token_ids,
            sampling=plan.token_sampling,
            transfer=transfer,
            source_kvd_address=source.kvd_address,
            source_engine_id=source.engine_id,
            lease_ms=lease_ms,
        )
        return prompt, token

    def give_up(self) -> None:
        """End the current attempt: what its machines may still say is not this request's any more."""
        self._given_up = True
        self.pushing = TRANSFER_MODE_UNSPECIFIED

    def runs(self, attempt: int) -> bool:
        """Whether `attempt` is the current one, and not given up."""
        return attempt == self.attempt and not self._given_up

    def _mode(self, length: int) -> TransferMode.ValueType:
        if self.admitted.transfer_mode:
            return self.admitted.transfer_mode
        return TRANSFER_MODE_SERIALIZED if length < self._serialized_below else TRANSFER_MODE_LAYERWISE

    @property
    def transfers(self) -> bool:
        """Whether the current attempt has a KV transfer; it has none for a single token."""
        return not self._merge.single

    @property
    def serial(self) -> int:
        """The scheduler's number of the current assignment; 0 before the first."""
        return self._assignment.serial if self._assignment is not None else 0

    @property
    def placement(self) -> Placement | None:
        """Where the current attempt runs."""
        if self._assignment is None:
            return None
        return Placement(
            prompt_machine=self._assignment.prompt_machine,
            token_machine=self._assignment.token_machine,
            reason=self._assignment.reason,
        )

    @property
    def answered(self) -> bool:
        """Whether the answer is complete: its last message is in the mailbox."""
        return self._answer.finished

    @property
    def first_seen(self) -> bool:
        """Whether this attempt's first token has come."""
        return self._merge.first_seen

    # -- tokens

    def prompt_tokens(self, tokens: Tokens, now: float) -> Piece | None:
        """Take the prompt side's tokens of the current attempt; returns the ending piece, if it ends."""
        if not self.progress.made:
            self._cached_prompt_tokens = tokens.cached_prompt_tokens
        return self._deliver(self._merge.from_prompt(_arrived(tokens)), now)

    def token_tokens(self, tokens: Tokens, now: float) -> Piece | None:
        """Take the token side's tokens of the current attempt; returns the ending piece, if it ends."""
        return self._deliver(self._merge.from_token(_arrived(tokens)), now)

    def _deliver(self, ordered: list[Arrived], now: float) -> Piece | None:
        for arrived in ordered:
            if self._answer.finished:
                break
            piece = self._answer.push(arrived)
            self.progress.add(piece.token_ids)
            self.timing.tokens(len(piece.token_ids), now)
            self.keeps_up = self.mailbox.put(piece)
            if piece.finish:
                self.finished = self._finished(piece, now)
                self.mailbox.finish(self.finished)
                return piece
        return None

    keeps_up = True  # False: the client reads too slowly

    def kv_received(self, stats: TransferStats | None) -> None:
        """The KV cache has arrived; `stats`: what the transfer cost, where that is known."""
        self._transfer = stats
        self.pushing = TRANSFER_MODE_UNSPECIFIED

    # -- the end

    def _finished(self, piece: Piece, now: float) -> Finished:
        finished = Finished(
            reason=piece.finish,
            prompt_tokens=len(self.progress.prompt),
            output_tokens=len(self.progress.made),
            cached_prompt_tokens=self._cached_prompt_tokens,
            stop_matched=piece.stop_matched,
            timing=self.timing.report(now),
            restarts=max(0, self.attempt - 1),
        )
        placement = self.placement
        if placement is not None:
            finished.placement.CopyFrom(placement)
        if self._transfer is not None:
            finished.transfer.CopyFrom(self._transfer)
        return finished

    def fail(self, error: RemoteError) -> None:
        """End the client's call with a status; what was delivered before still goes out."""
        self.mailbox.fail(error)


def _arrived(tokens: Tokens) -> Arrived:
    return Arrived(list(tokens.ids), tokens.logprobs, tokens.finish)
