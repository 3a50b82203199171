"""One emulated engine in its own process, driven by JSON lines: commands in, events out.

``python -m tests.services.emulated.engine_process ENGINE_ID KVD_SOCKET OPTIONS_JSON``
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from services.engine.emulated import EmulatedEngine, settings_from_options
from services.engine.interface import PromptWork, TokenWork, Transfer, TransferFailedError, WorkKey
from splitwise.rpc.v1.common_pb2 import SamplingParams


def tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


class EngineProcess:
    def __init__(self, engine: EmulatedEngine) -> None:
        self.engine = engine
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def handle(self, command: dict[str, Any]) -> None:
        what = command.pop("do")
        if what in ("prompt", "token"):
            name = command["name"]
            self.tasks[name] = asyncio.create_task(self.work(what, **command))
        elif what == "cancel":
            # After the task's first step: one that never ran would have nobody to tell of its end.
            asyncio.get_running_loop().call_soon(self.tasks[command["name"]].cancel)
        elif what == "load":
            load = self.engine.load()
            tell(
                event="load",
                used=load.kv_blocks_used,
                preemptions=load.preemptions,
                failure=self.engine.failure(),
                open=self.engine.client.open_transfers(),
            )
        elif what == "flip":
            machine = self.engine._machine
            assert machine is not None
            machine.store.memory.buffer[command["at"]] ^= 0x40
            tell(event="flipped")

    async def work(
        self,
        what: str,
        name: str,
        tokens: list[int],
        sampling: dict[str, Any],
        transfer: str | None,
        source_kvd: str = "",
        source_engine: str = "",
        mode: int = 2,
        lease_ms: int = 60_000,
    ) -> None:
        bias = {int(token): value for token, value in sampling.pop("logit_bias", {}).items()}
        params = SamplingParams(**sampling, logit_bias=bias)
        key = WorkKey(name, 1)
        ref = Transfer(bytes.fromhex(transfer), 1) if transfer else None
        if what == "prompt":
            outputs = self.engine.run_prompt(PromptWork(key, tokens, params, ref, mode, lease_ms))  # type: ignore[arg-type]
        else:
            assert ref is not None
            outputs = self.engine.run_token(
                TokenWork(key, tokens, params, ref, source_kvd, source_engine, lease_ms)
            )
        try:
            async for output in outputs:
                tell(
                    event="tokens",
                    name=name,
                    ids=output.token_ids,
                    finish=output.finish,
                    cached=output.cached_prompt_tokens,
                )
            tell(event="over", name=name)
        except asyncio.CancelledError:
            tell(event="cancelled", name=name)
        except TransferFailedError as error:
            tell(event="failed", name=name, corrupt=error.corrupt, message=str(error))
        except Exception as error:  # noqa: BLE001 - the test looks at its kind
            tell(event="error", name=name, kind=type(error).__name__, message=str(error))


async def main() -> None:
    engine_id, socket, options = sys.argv[1:4]
    engine = EmulatedEngine(settings_from_options(json.loads(options)), engine_id, socket)
    description = await engine.start()
    tell(event="ready", fingerprint=description.kv_fingerprint, incarnation=description.identity.incarnation)
    process = EngineProcess(engine)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        process.handle(json.loads(line))
    for task in process.tasks.values():
        task.cancel()
    await asyncio.gather(*process.tasks.values(), return_exceptions=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
