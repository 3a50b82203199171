"""Load generators that know nothing of Splitwise run against a real router unchanged.

Its machines are emulated; text goes through the default model's tokenizer. guidellm and aiperf
have requirements of their own that do not go with the engine's: install each into an environment
of its own and put its command on the PATH.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from splitwise.errors import ConfigError
from splitwise.models.default import prepare_default_model
from tests.services.gateway.live_cluster import LiveCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
REQUESTS, TOKENS = 6, 16
MODEL = "emulated"

# The command `vllm` wants the package to be called vllm, which the CPU build is not.
VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


@pytest.fixture(scope="module")
def tokenizer() -> Path:
    try:
        return prepare_default_model().path
    except ConfigError as error:
        pytest.skip(f"needs the default model's tokenizer: {error}")


@pytest.fixture
async def cluster(tokenizer: Path, tmp_path: Path) -> AsyncIterator[LiveCluster]:
    """Two machines of each phase; every request must have come through both."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    cluster = LiveCluster(folder)
    config = json.loads((tokenizer / "config.json").read_text())
    try:
        await cluster.start_router(f"--models.{MODEL}", str(tokenizer))
        await cluster.start_machines(
            "2xH100:prompt", "2xH100:token", vocab_size=config["vocab_size"], time_scale=0.1
        )
        yield cluster
    finally:
        await cluster.stop()


async def check_served(cluster: LiveCluster) -> None:
    """The router saw what the tool counted, and nothing is left of it."""
    await cluster.until_idle()
    state = await cluster.until(lambda state: len(state["requests"]) >= REQUESTS)
    counters = state["counters"]
    assert counters["finished"] >= REQUESTS  # tools send some for warming up
    assert counters.get("failed", 0) == counters.get("cancelled", 0) == 0
    assert all(request["transfer"]["bytes"] for request in state["requests"] if request["output_tokens"] > 1)


async def run(*command: str, folder: Path) -> str:
    """Run a tool in `folder`; returns what it printed, raises when it fails."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "200"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 500)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode(errors="replace")
    assert process.returncode == 0, text[-4000:]
    return text


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("kind", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
async def test_vllm_bench_serve(
    cluster: LiveCluster, tokenizer: Path, tmp_path: Path, kind: str, path: str
) -> None:
    options = {
        "backend": kind,
        "base-url": cluster.http,
        "endpoint": path,
        "model": MODEL,
        "tokenizer": str(tokenizer),
        "dataset-name": "random",
        "random-input-len": "32",
        "random-output-len": str(TOKENS),
        "num-prompts": str(REQUESTS),
        "result-dir": str(tmp_path),
        "result-filename": "result.json",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    await run(sys.executable, "-c", VLLM_BENCH, *arguments, "--save-result", "--ignore-eos", folder=tmp_path)
    result = read(tmp_path / "result.json")
    assert result["completed"] == REQUESTS
    assert result["total_output_tokens"] == REQUESTS * TOKENS
    await check_served(cluster)


@pytest.mark.skipif(shutil.which("guidellm") is None, reason="guidellm is not on the PATH")
async def test_guidellm(cluster: LiveCluster, tokenizer: Path, tmp_path: Path) -> None:
    await run(
        *("guidellm", "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={cluster.http},model={MODEL}"),
        *("--profile", "kind=synchronous"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"),
        *("--output", f"kind=json,path={tmp_path / 'result.json'}"),
        folder=tmp_path,
    )
    totals = read(tmp_path / "result.json")["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    await check_served(cluster)


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.skipif(shutil.which("aiperf") is None, reason="aiperf is not on the PATH")
async def test_aiperf(cluster: LiveCluster, tokenizer: Path, tmp_path: Path, kind: str) -> None:
    await run(
        *("aiperf", "profile", "--model", MODEL, "--url", cluster.http),
        *("--endpoint-type", kind, "--streaming", "--use-server-token-count"),
        *("--tokenizer", str(tokenizer), "--synthetic-input-tokens-mean", "32"),
        *("--output-tokens-mean", str(TOKENS), "--extra-inputs", "ignore_eos:true"),
        *("--request-count", str(REQUESTS), "--concurrency", "2", "--ui", "none"),
        *("--artifact-dir", str(tmp_path)),
        folder=tmp_path,
    )
    result = read(tmp_path / "profile_export_aiperf.json")
    assert result["request_count"]["avg"] == REQUESTS
    assert result["output_sequence_length"]["avg"] == TOKENS
    await check_served(cluster)
