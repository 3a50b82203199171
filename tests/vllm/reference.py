"""What one plain vLLM engine answers: the truth that the split is held against."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class PlainEngine:
    """A process that is started by the first question; an answer is computed once and remembered.

    It has no prefix cache, computes each prompt in one pass and one request at a time, in
    float32: nothing that the split does differently is in its answers. `arguments` are vLLM's.
    """

    def __init__(self, model: Path, **arguments: Any) -> None:
        self._arguments = {
            "model": str(model),
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 4224,
            "max_num_batched_tokens": 4224,
            "kv_cache_memory_bytes": 256 << 20,
            **arguments,
        }
        self._answers: dict[str, list[int]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def answer(self, tokens: Sequence[int], **sampling: Any) -> list[int]:
        """Return the token ids after `tokens`: greedy, ``max_tokens`` of them, unless `sampling` differs."""
        question = json.dumps({"tokens": list(tokens), "sampling": sampling}, sort_keys=True)
        async with self._turn:
            if question not in self._answers:
                self._answers[question] = await self._ask(question)
        return self._answers[question]

    async def answers(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
        """Return the answers to several prompts."""
        return [await self.answer(tokens, **sampling) for tokens in prompts]

    async def _ask(self, question: str) -> list[int]:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.vllm.plain_engine", json.dumps(self._arguments)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 20,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question.encode() + b"\n")
        while line := await self._process.stdout.readline():
            if line.startswith(b'{"answer"'):
                answer: list[int] = json.loads(line)["answer"]
                return answer
        raise AssertionError("the plain engine ended; its messages are above")

    async def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()
