"""kill -9 of either process of an engine: the other one knows, and nothing stays."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from services.engine.vllm.folder import PREFIX, EngineFolder
from tests.services.emulated.cluster import Daemon
from tests.vllm.conftest import settings
from tests.vllm.harness import PATIENCE
from tests.vllm.shared_memory import nothing_left

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from splitwise.models import ModelFolder

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]


@asynccontextmanager
async def front(model: ModelFolder, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run one engine in a process of its own, with a daemon; `folder` takes all that it makes."""
    daemon = Daemon(folder, "front")
    await daemon.start()
    small = settings(model, kv_bytes=40 << 20, max_model_len=512).model_dump_json()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.vllm.front_process", small, str(daemon.socket)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        await line(process, b"ready")
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await daemon.kill()


async def line(process: asyncio.subprocess.Process, word: bytes) -> bytes:
    """Read what the front says, up to a line with `word`."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        while said := await process.stdout.readline():
            if word in said:
                return said
    raise AssertionError(f"the front ended without saying {word!r}")


def core_of(process: asyncio.subprocess.Process) -> psutil.Process:
    """Find the engine core: the child with the model in memory."""
    return max(psutil.Process(process.pid).children(), key=lambda child: int(child.memory_info().rss))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - nobody tells of another process's end
            await asyncio.sleep(0.05)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def folders(base: Path) -> list[Path]:
    return list(base.glob(f"{PREFIX}*"))


async def test_the_engine_core_is_killed(model: ModelFolder, short: Path) -> None:
    """The front says so at once, closes without hanging, and removes the folder."""
    async with nothing_left(), front(model, short) as process:
        family = psutil.Process(process.pid).children(recursive=True)
        core_of(process).send_signal(signal.SIGKILL)
        assert b"core died" in await line(process, b"failure")
        await asyncio.wait_for(process.wait(), PATIENCE)
        assert process.returncode == 0
        await until(lambda: gone(family))
        assert folders(short) == []


async def test_the_front_is_killed(model: ModelFolder, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core ends itself; the folder goes when the next engine starts."""
    async with nothing_left(), front(model, short) as process:
        family = psutil.Process(process.pid).children(recursive=True)
        assert core_of(process) in family
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await until(lambda: gone(family))
        monkeypatch.setattr(tempfile, "tempdir", str(short))
        following = EngineFolder()
        assert folders(short) == [following.path]
        following.remove()
