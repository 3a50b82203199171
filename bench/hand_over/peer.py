"""vLLM's own split of the phases as a peer: two engines with its NixlConnector.

The package is optional: ``pip install --no-deps nixl nixl-cu12`` (no GPU is needed).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import socket
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm import SamplingParams


def nixl_is_installed() -> bool:
    """Whether the peer can run."""
    return importlib.util.find_spec("nixl") is not None


class NixlPair:
    """A prompt and a token engine, as vLLM's disaggregated serving runs them.

    The token engine *pulls*: it is given a request when the prompt engine has finished, reads all
    KV blocks, and computes the prompt's last position once more.
    """

    def __init__(self, make_engine: Callable[[dict[str, Any]], Any]) -> None:
        self._make_engine = make_engine

    async def start(self) -> None:
        """Load both engines."""
        self._prompt = await self._engine()
        self._token = await self._engine()

    async def _engine(self) -> Any:
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free.getsockname()[1])
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        return await asyncio.to_thread(self._make_engine, transfer)

    def stop(self) -> None:
        """Stop both."""
        self._prompt.shutdown()
        self._token.shutdown()

    async def run(self, tokens: list[int], name: str, sampling: Callable[..., SamplingParams]) -> list[float]:
        """Return when each token of one request came, in seconds after its start.

        The first token is the prompt engine's; the token engine's copy of it is left out.
        """
        start = time.perf_counter()
        times: list[float] = []
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        first = sampling(max_tokens=1, extra_args={"kv_transfer_params": params})
        async for output in self._prompt.generate(_prompt(tokens), first, f"{name}-prompt"):
            if output.outputs[0].token_ids:
                times.append(time.perf_counter() - start)
            params = output.kv_transfer_params or params
        later = sampling(extra_args={"kv_transfer_params": params})
        made = 0
        async for output in self._token.generate(_prompt(tokens), later, f"{name}-token"):
            for _ in output.outputs[0].token_ids:
                made += 1
                if made > 1:
                    times.append(time.perf_counter() - start)
        return times


def _prompt(tokens: list[int]) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": tokens}
