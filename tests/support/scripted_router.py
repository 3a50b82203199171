"""A real gRPC server with a router that does what the prompt says, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

from splitwise import errors
from splitwise.rpc.channels import RpcServer
from splitwise.rpc.status import abort
from splitwise.rpc.v1 import common_pb2, router_pb2, router_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc.aio

    from splitwise.config import Address, TlsSettings

FAILURES: dict[str, type[errors.RemoteError]] = {
    "overloaded": errors.OverloadedError,
    "unavailable": errors.UnavailableError,
    "invalid": errors.InvalidRequestError,
    "data_loss": errors.DataLossError,
}


class ScriptedRouter(router_pb2_grpc.RouterServicer):
    """Follows the prompt's words.

    ``fail KIND N``: the first N tries fail before anything is sent. ``break KIND``: fails after
    two tokens. ``endless``: never ends. ``silent``: never begins. ``unfinished``: ends without
    `finished`. Anything else is echoed word by word.
    """

    def __init__(self) -> None:
        self.requests: list[router_pb2.GenerateRequest] = []
        self.times: list[float] = []
        self.running = 0
        self.retry_after: float | None = None
        self.drained: dict[str, bool] = {}
        self.describe_failures = 0

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        self.requests.append(request)
        self.times.append(time.monotonic())
        self.running += 1
        try:
            async for message in self._answer(request, context):
                yield message
        finally:
            self.running -= 1

    async def _answer(self, request: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        words = (request.text or "from tokens").split()
        match words:
            case ["fail", kind, count] if len(self.requests) <= int(count):
                await abort(context, FAILURES[kind](f"scripted {kind}", retry_after=self.retry_after))
            case ["silent"]:
                await asyncio.sleep(3600)
            case _:
                pass
        yield router_pb2.GenerateResponse(
            request_id=f"r{len(self.requests)}", client_request_id=request.client_request_id, prompt_tokens=7
        )
        for index in range(10**9 if words == ["endless"] else len(words)):
            yield router_pb2.GenerateResponse(
                text=f"{words[index % len(words)]} ",
                token_ids=[index],
                logprobs=[
                    common_pb2.TokenLogprob(
                        token_id=index,
                        logprob=-0.5,
                        top=[common_pb2.TokenAlternative(token_id=9, logprob=-1)],
                    )
                ]
                if request.sampling.HasField("logprobs")
                else [],
            )
            if words[0] == "break" and index == 1:
                await abort(context, FAILURES[words[1]]("scripted break"))
            if words == ["endless"]:
                await asyncio.sleep(0.01)
        if words == ["unfinished"]:
            return
        yield router_pb2.GenerateResponse(finished=_finished(len(words)))

    async def ListModels(self, request: Any, context: Any) -> router_pb2.ListModelsResponse:
        model = router_pb2.ModelDescription(name="tiny", max_model_len=64, serving=True)
        return router_pb2.ListModelsResponse(models=[model])

    async def DescribeCluster(self, request: Any, context: Any) -> router_pb2.ClusterDescription:
        if self.describe_failures:
            self.describe_failures -= 1
            await abort(context, errors.UnavailableError("scripted"))
        return _cluster()

    async def Explain(self, request: Any, context: Any) -> router_pb2.Explanation:
        if request.request_id != "r1":
            await abort(context, errors.NotFoundError(f"request_id: {request.request_id!r} is not known"))
        candidate = router_pb2.Candidate(
            machine_id="p0",
            phase=common_pb2.PHASE_PROMPT,
            pool=common_pb2.POOL_PROMPT,
            queue_tokens=12,
            chosen=True,
            kv_blocks_used=7,
            kv_blocks=100,
            cached_tokens=64,
        )
        record = router_pb2.DecisionRecord(
            kind="assign",
            reason="jsq:prompt-pool",
            prompt_machine="p0",
            token_machine="t0",
            candidates=[candidate],
            at_us=2_000_000,
            prompt_machines_left_out=31,
        )
        return router_pb2.Explanation(request_id="r1", decisions=[record])

    async def DrainMachine(self, request: Any, context: Any) -> router_pb2.DrainMachineResponse:
        self.drained[request.machine_id] = not request.undo
        return router_pb2.DrainMachineResponse(state="serving" if request.undo else "draining")


def _finished(tokens: int) -> router_pb2.Finished:
    return router_pb2.Finished(
        reason=common_pb2.FINISH_REASON_LENGTH,
        prompt_tokens=7,
        output_tokens=tokens,
        cached_prompt_tokens=3,
        timing=router_pb2.Timing(
            queued_us=1, ttft_us=2_000_000, second_us=3_000, tbt_mean_us=4, tbt_max_us=5, e2e_us=6
        ),
        placement=router_pb2.Placement(prompt_machine="p0", token_machine="t0", reason="jsq:prompt-pool"),
        transfer=common_pb2.TransferStats(
            bytes=4096,
            puts=2,
            blocks=4,
            blocks_skipped=1,
            push_us=1_000,
            exposed_us=250,
            mode=common_pb2.TRANSFER_MODE_LAYERWISE,
            transport="ucx",
        ),
        restarts=1,
    )


def _cluster() -> router_pb2.ClusterDescription:
    description = common_pb2.MachineDescription(
        identity=common_pb2.MachineIdentity(machine_id="p0", incarnation=1),
        address="127.0.0.1:9",
        home_pool=common_pb2.POOL_PROMPT,
        kv_blocks=100,
        engine="emulated",
    )
    status = router_pb2.MachineStatus(
        description=description,
        pool=common_pb2.POOL_MIXED,
        state="borrowed",
        load=common_pb2.LoadReport(kv_blocks_used=5),
        report_age_ms=1500,
    )
    return router_pb2.ClusterDescription(
        machines=[status],
        queued=2,
        running=1,
        policy="jsq",
        counters=router_pb2.RequestCounters(received=3),
    )


class ServerThread:
    """Runs `RpcServer` with the scripted router until `close`."""

    def __init__(self, address: Address, tls: TlsSettings | None) -> None:
        self.router = ScriptedRouter()
        self.address = address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self.run(self._start(tls))

    async def _start(self, tls: TlsSettings | None) -> RpcServer:
        server = RpcServer(self.address, ["splitwise.v1.Router"], tls=tls)
        router_pb2_grpc.add_RouterServicer_to_server(self.router, server.grpc)
        self.address = await server.start()
        await server.set_serving(True)
        return server

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def close(self) -> None:
        self.run(self._server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


def eventually(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Wait until `condition` holds; says whether it ever did."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
