"""One router, as its two front ends use it: gRPC's servicer and the HTTP gateway."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.router.dashboard.recent import MODES, RecentRequests, RequestRecord
from services.router.describe import describe_cluster, describe_models
from services.router.metrics import REFUSALS, observe
from splitwise.errors import NotFoundError, RemoteError, UnavailableError
from splitwise.requests import FieldError
from splitwise.rpc.status import status_of
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from services.router.admission import Admission
    from services.router.dispatcher import Dispatcher
    from services.router.models import Models
    from services.router.session import Admitted, Session
    from splitwise.rpc.v1.router_pb2 import (
        ClusterDescription,
        Explanation,
        GenerateRequest,
        GenerateResponse,
        ModelDescription,
    )

_REASONS = {1: "stop", 2: "length", 3: "cancelled"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was checked and not started."""

    admitted: Admitted
    frontend: Frontend

    @property
    def request_id(self) -> str:
        """The router's id of it."""
        return self.admitted.request_id

    @property
    def prompt_tokens(self) -> int:
        """How many tokens its prompt has."""
        return len(self.admitted.token_ids)

    def run(self) -> AsyncGenerator[GenerateResponse, None]:
        """Serve it; closing the generator cancels it. To be called once."""
        return self.frontend.run(self.admitted)


class Frontend:
    """Requests in, messages out; also what the dashboard shows."""

    def __init__(self, admission: Admission, models: Models) -> None:
        self._admission = admission
        self._models = models
        self.dispatcher: Dispatcher
        self.recent = RecentRequests()
        self.draining = False

    async def prepare(self, request: GenerateRequest, *, time_left: float | None = None) -> Prepared:
        """Check a request fully; nothing is started. Raises `splitwise.errors`.

        `time_left`: seconds until the client's deadline; None without one.
        """
        deadline = None if time_left is None else time.monotonic() + time_left
        try:
            if self.draining:
                raise UnavailableError("the router is draining", retry_after=1.0)
            return Prepared(await self._admission.admit(request, deadline), self)
        except RemoteError as error:
            REFUSALS.labels(status_of(error).name).inc()
            raise

    async def run(self, admitted: Admitted) -> AsyncGenerator[GenerateResponse, None]:
        """Serve an admitted request; closing the generator cancels it. Raises `splitwise.errors`."""
        session = self.dispatcher.submit(admitted, self._models.get(admitted.model).block_tokens)
        first = True
        try:
            while True:
                message = await session.mailbox.take()
                message.request_id = session.request_id
                message.client_request_id = admitted.client_request_id
                if first:
                    message.prompt_tokens = len(admitted.token_ids)
                    first = False
                yield message
                if message.HasField("finished"):
                    return
        finally:
            self.dispatcher.leave(session)

    def list_models(self) -> Sequence[ModelDescription]:
        """Return the models that are known now."""
        return describe_models(self.dispatcher, self._models)

    def serving(self) -> bool:
        """Return whether new requests are taken."""
        return not self.draining and any(model.serving for model in self.list_models())

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        """Return the token ids of a request's prompt; raises as `prepare` does."""
        return await self._admission.tokenize(request)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; raises `NotFoundError` and `FieldError`."""
        known = self._models.get(model)
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < known.vocab_size:
                problem = f"token id {token_id} is outside the vocabulary of {known.vocab_size}"
                raise FieldError(f"token_ids[{index}]", problem)
        detokenizer = known.vocabulary.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def spell(self, model: str, token_id: int) -> bytes:
        """Return one token's own bytes, a special token's name included."""
        return self._models.get(model).vocabulary.spell(token_id)

    def cluster(self) -> ClusterDescription:
        """Return the cluster as it is now."""
        return describe_cluster(self.dispatcher, self._models)

    def explain(self, request_id: str) -> Explanation:
        """Return why a request ran where it ran; raises `NotFoundError`."""
        found = self.dispatcher.journal.explain(request_id)
        if found is None:
            raise NotFoundError(
                f"request_id: {request_id[:80]!r} is not known; only the latest requests are kept"
            )
        return found

    def running(self) -> Iterable[RequestRecord]:
        """Return the requests that have a machine and are not over."""
        now = time.monotonic()
        for session in list(self.dispatcher.sessions.values()):
            placement = session.placement
            if placement is None:
                continue
            yield RequestRecord(
                request_id=session.request_id,
                model=session.admitted.model,
                outcome="running",
                began_unix_ms=(time.time() - (now - session.admitted.arrived)) * 1e3,
                queued_us=_us(session.timing.queued),
                ttft_us=_us(session.timing.ttft),
                e2e_us=_us(now - session.admitted.arrived),
                prompt_tokens=len(session.progress.prompt),
                output_tokens=len(session.progress.made),
                prompt_machine=placement.prompt_machine,
                token_machine=placement.token_machine,
                reason=placement.reason,
                restarts=max(0, session.attempt - 1),
                pushing=MODES.get(session.pushing, ""),
            )

    def ended(self, session: Session) -> None:
        """Keep and count a request that is over."""
        observe(session)
        if session.finished is not None:
            outcome = _REASONS.get(session.finished.reason, "stop")
            self.recent.finished(session.request_id, session.admitted.model, session.finished, outcome)
            return
        if session.outcome == "failed":
            get_logger().warning(
                "request.failed",
                request_id=session.request_id,
                model=session.admitted.model,
                attempts=session.attempt,
            )
        e2e = time.monotonic() - session.admitted.arrived
        self.recent.add(
            RequestRecord(
                request_id=session.request_id,
                model=session.admitted.model,
                outcome=session.outcome or "failed",
                began_unix_ms=(time.time() - e2e) * 1e3,
                e2e_us=_us(e2e),
                prompt_tokens=len(session.progress.prompt),
                output_tokens=len(session.progress.made),
            )
        )


def _us(seconds: float | None) -> int:
    return 0 if seconds is None else max(0, round(seconds * 1e6))
