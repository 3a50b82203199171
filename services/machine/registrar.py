"""Keeping this machine known to its routers: registration, then a heartbeat."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc.aio

from splitwise.rpc.channels import open_channel
from splitwise.rpc.identity import Role
from splitwise.rpc.status import to_exception
from splitwise.rpc.v1.router_pb2 import RegisterRequest
from splitwise.rpc.v1.router_pb2_grpc import RouterStub
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitwise.config import Address, TlsSettings
    from splitwise.rpc.v1.common_pb2 import LoadReport, MachineDescription

CALL_TIMEOUT_S = 5.0
RETRY_S = 0.5
MAX_RETRY_S = 2.0


async def keep_registered(
    router: Address,
    description: MachineDescription,
    load: Callable[[], LoadReport],
    tls: TlsSettings | None,
) -> None:
    """Register with one router for as long as this coroutine runs; says each problem once."""
    log = get_logger().bind(router=str(router))
    channel = open_channel(router, tls=tls, role=Role.ROUTER)
    registered, problem, delay_s = False, "", RETRY_S
    try:
        while True:
            request = RegisterRequest(machine=description, load=load())
            try:
                answer = await RouterStub(channel).Register(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                known = to_exception(error)
                if known.message != problem:
                    log.warning("registration.failed", code=known.code, error=known.message)
                registered, problem = False, known.message
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_RETRY_S)
                continue
            if not registered:
                log.info("registration.done", lease_ms=answer.lease_ms)
            registered, problem, delay_s = True, "", RETRY_S
            await asyncio.sleep(answer.heartbeat_ms / 1000)
    finally:
        await channel.close(None)
