"""Calls to a router over gRPC, as tests make them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitwise.config import Address
from splitwise.rpc.channels import open_channel
from splitwise.rpc.v1 import router_pb2 as pb
from splitwise.rpc.v1.common_pb2 import SamplingParams, TokenIds
from splitwise.rpc.v1.router_pb2_grpc import RouterStub

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Answer:
    """All that one Generate call gave; `code` is OK unless it failed."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    messages: list[pb.GenerateResponse] = field(default_factory=list)
    finished: pb.Finished | None = None
    code: str = "OK"
    details: str = ""
    retry_after: str | None = None


class RouterCalls:
    """A channel to one router."""

    def __init__(self, address: str) -> None:
        self.channel = open_channel(Address.parse(address))
        self.stub: Any = RouterStub(self.channel)

    async def serving(self) -> bool:
        request = health_pb2.HealthCheckRequest(service="splitwise.v1.Router")
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(request)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        timeout: float = 240,  # noqa: ASYNC109 - gRPC's own
        leave_after: int | None = None,
        client_request_id: str = "",
        **sampling: Any,
    ) -> Answer:
        """Run one request; `leave_after` messages the client cancels."""
        request = pb.GenerateRequest(
            model=model, sampling=SamplingParams(**sampling), client_request_id=client_request_id
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(TokenIds(ids=prompt))
        return await self.collect(self.stub.Generate(request, timeout=timeout), leave_after)

    async def raw(self, message: bytes) -> Answer:
        """Send bytes as they are to Generate."""
        call: Any = self.channel.unary_stream("/splitwise.v1.Router/Generate")
        return await self.collect(call(message, timeout=60), None)

    @staticmethod
    async def collect(call: Any, leave_after: int | None) -> Answer:
        answer = Answer()
        try:
            if leave_after == 0:
                call.cancel()
            async for message in call:
                answer.messages.append(message)
                answer.pieces.append(message.text)
                answer.text += message.text
                answer.token_ids += message.token_ids
                if message.HasField("finished"):
                    answer.finished = message.finished
                if leave_after is not None and len(answer.messages) >= leave_after:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            answer.code = error.code().name
            answer.details = error.details() or ""
            answer.retry_after = dict(error.trailing_metadata() or ()).get("retry-after-ms")  # type: ignore[assignment]
        except BaseException:
            if not call.cancelled():
                raise
            answer.code = "CANCELLED"
        return answer

    async def cluster(self) -> pb.ClusterDescription:
        found: pb.ClusterDescription = await self.stub.DescribeCluster(pb.DescribeClusterRequest())
        return found

    async def refusal(self, method: str, request: Any) -> tuple[str, str]:
        """Return status and message of a unary call that must fail."""
        try:
            await getattr(self.stub, method)(request, timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        raise AssertionError(f"{method} was not refused")
