"""A gateway over a scripted router, on a free port, and clients for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import openai
import pytest

from services.router.gateway import GatewayOptions, serve_gateway
from splitwise.config import Address
from tests.services.gateway.scripted import ScriptedBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def options() -> GatewayOptions:
    return GatewayOptions(drain_s=5)


@pytest.fixture
async def address(backend: ScriptedBackend, options: GatewayOptions) -> AsyncIterator[Address]:
    async with serve_gateway(backend, Address("127.0.0.1", 0), options) as gateway:
        yield gateway.address


@pytest.fixture
async def client(address: Address) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def http(address: Address) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{address}") as session:
        yield session
