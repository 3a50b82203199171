"""Every service of the compose file, by its own command line and environment, serves a request."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.engine.emulated import settings_from_options
from services.engine.emulated.expected import expected_tokens
from splitwise.client import Client
from splitwise.config import TlsSettings
from tests.services.deploy.shim import Stack
from tests.support.compose_file import FILE, ROOT, TLS_FILE, load

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(900)
PROMPT = list(range(1, 700))  # above the threshold: pushed layer by layer


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: paths of Unix sockets may have 107 characters."""
    path = Path(tempfile.mkdtemp(prefix="sw-compose-"))
    yield path
    shutil.rmtree(path)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "splitwise" in path.name}


def answer(stack: Stack, tls: TlsSettings | None = None) -> tuple[list[int], str]:
    with Client(f"{stack.addresses['router']}:7400", tls=tls, timeout=60) as client:
        stream = client.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True)
        result = stream.result()
    assert result.transfer is not None
    assert result.transfer.transport == "ucx"  # the nodes' daemons are two
    return list(result.token_ids), result.placement.token_machine


@pytest.mark.slow
def test_the_cpu_stack_as_it_stands(folder: Path):
    stack = Stack(load(FILE), "cpu", folder)
    assert set(stack.services) == {
        "router", "kvd-prompt", "kvd-token", "prompt-0", "prompt-1", "token-0", "token-1"
    }  # fmt: skip
    wanted = expected_tokens(settings_from_options({}), PROMPT, 6, ignore_eos=True)
    try:
        stack.start()
        assert answer(stack)[0] == wanted
        assert '"event": "peer.connected' in stack.log("kvd-prompt").read_text()
        assert '"transports": ["' in stack.log("kvd-prompt").read_text()
        base = f"http://{stack.addresses['router']}:8000"
        body = json.dumps({"model": "emulated", "prompt": "hello", "max_tokens": 3}).encode()
        request = urllib.request.Request(f"{base}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 3
        for address in stack.addresses.values():
            with urllib.request.urlopen(f"http://{address}:9100/metrics", timeout=60) as response:
                assert b"splitwise_process_info" in response.read()
        # a node's daemon may be taken away alone: its engines find the next one
        assert stack.stop("kvd-token") == 0
        stack.launch("kvd-token")
        for name in ("kvd-token", "token-0", "token-1", "router"):
            stack.wait_healthy(name)
        assert answer(stack)[0] == wanted
        for name in ("router", "prompt-0", "prompt-1", "token-0", "token-1", "kvd-prompt", "kvd-token"):
            assert stack.stop(name) == 0, stack.tail(name)
    finally:
        stack.close()


@pytest.mark.slow
def test_the_stack_with_certificates(folder: Path):
    certificates = folder / "certificates"
    subprocess.run([str(ROOT / "scripts/make_certificates.sh"), str(certificates)], check=True, timeout=60)
    content = load(FILE, TLS_FILE, variables={"SPLITWISE_CERTIFICATES": str(certificates)})
    stack = Stack(content, "cpu", folder, ("router", "kvd-prompt", "kvd-token", "prompt-0", "token-0"))
    client, stranger = (
        TlsSettings(
            ca=certificates / "ca.pem",
            certificate=certificates / f"{name}.pem",
            key=certificates / f"{name}.key",
        )
        for name in ("client", "kvd")
    )
    try:
        stack.start()
        assert answer(stack, client)[1] == "token-0"
        with pytest.raises(Exception, match="needs client or operator"):
            answer(stack, stranger)
    finally:
        stack.close()


@pytest.mark.vllm
def test_the_stack_with_the_real_engine(folder: Path):
    from splitwise.models import prepare_default_model

    models = prepare_default_model().path.parent
    variables = {"SPLITWISE_ENGINE": "cpu", "SPLITWISE_MODELS": str(models)}
    content = load(FILE, variables=variables)
    stack = Stack(content, "cpu", folder, ("router", "kvd-prompt", "kvd-token", "prompt-0", "token-0"))
    before = shared_memory()
    try:
        stack.start()
        with Client(f"{stack.addresses['router']}:7400", timeout=120) as client:
            result = client.generate("The sky is", max_tokens=8, temperature=0).result()
        assert result.text.strip()
        assert result.placement.prompt_machine == "prompt-0"
        assert result.transfer is not None
        for name in ("router", "prompt-0", "token-0", "kvd-prompt", "kvd-token"):
            assert stack.stop(name) == 0, stack.tail(name)
    finally:
        stack.close()
    assert shared_memory() <= before
