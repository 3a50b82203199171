"""A process with one real engine, as a machine's is; says when it is ready, then waits to be killed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from services.engine.vllm import VllmEngine, VllmSettings


async def main() -> None:
    """Take the settings (JSON) and the daemon's socket as arguments."""
    engine = VllmEngine(VllmSettings.model_validate_json(sys.argv[1]), "front", Path(sys.argv[2]))
    await engine.start()
    print(json.dumps({"ready": True}), flush=True)
    while engine.failure() is None:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    print(json.dumps({"failure": engine.failure()}), flush=True)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
