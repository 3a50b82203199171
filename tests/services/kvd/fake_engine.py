"""An engine without a model: random bytes in its KV memory, the daemon's real client in front."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from typing import TYPE_CHECKING, Any

from services.kvd.client import KvdClient, Released, push_entry
from services.kvd.memfd import MemfdMemory
from splitwise.kv.identity import TransferKey
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE
from splitwise.rpc.v1.kvd_pb2 import KvGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.kvd.client import Notice

PATIENCE = 40.0  # seconds; a loaded machine is slow, not wrong
LAYERS, BLOCKS, BLOCK_BYTES = 3, 48, 4096


def new_key(generation: int = 1) -> TransferKey:
    return TransferKey(secrets.token_bytes(16), generation)


def geometry(blocks: int = BLOCKS, block_bytes: int = BLOCK_BYTES, **changes: Any) -> KvGeometry:
    facts: dict[str, Any] = {
        "layers": LAYERS,
        "num_blocks": blocks,
        "block_bytes_per_layer": block_bytes,
        "layer_stride_bytes": blocks * block_bytes,
        "block_stride_bytes": block_bytes,
        "block_tokens": 16,
        "dtype": "bfloat16",
        "layout": "LBHNC",
        "model": "fake",
        "backend": "none",
        "tp_size": 1,
    }
    return KvGeometry(**{**facts, **changes})


class FakeEngine:
    """Attached at once. `write` fills blocks with random bytes, `block` reads one back."""

    def __init__(self, socket: str, name: str, *, attach: bool = True, **shape: Any) -> None:
        self.name = name
        self.geometry = geometry(**shape)
        size = self.geometry.layers * self.geometry.layer_stride_bytes
        self.memory = MemfdMemory(size, name)
        self.client = KvdClient(socket, name)
        self.notices: dict[TransferKey, list[Notice]] = {}
        if attach:
            self.client.attach(self.geometry, self.memory, timeout=PATIENCE)

    def until_attached(self) -> None:
        """Wait until a daemon serves this engine again."""
        deadline = time.monotonic() + PATIENCE
        while (failure := self.client.failure()) is not None:
            assert time.monotonic() < deadline, failure
            time.sleep(0.01)

    def close(self) -> None:
        self.client.close()
        with contextlib.suppress(BufferError):
            self.memory.close()

    # ---- bytes

    def _at(self, layer: int, block: int) -> slice:
        start = layer * self.geometry.layer_stride_bytes + block * self.geometry.block_stride_bytes
        return slice(start, start + self.geometry.block_bytes_per_layer)

    def block(self, layer: int, block: int) -> bytes:
        return self.memory.buffer[self._at(layer, block)]

    def bytes_of(self, blocks: Sequence[int]) -> list[bytes]:
        return [self.block(layer, block) for layer in range(self.geometry.layers) for block in blocks]

    def write(self, layer: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.memory.buffer[self._at(layer, block)] = random.randbytes(self.geometry.block_bytes_per_layer)

    # ---- prompt side

    def expect(self, key: TransferKey, mode: Any = TRANSFER_MODE_LAYERWISE, lease_ms: int = 60_000) -> None:
        self.client.expect(Ref(key), 100, mode, lease_ms)

    def run_pass(
        self, key: TransferKey, first: int, blocks: Sequence[int], *, final: bool, restart: bool = False
    ) -> None:
        """One forward pass: announce, then write and count layer by layer."""
        self.client.push_plan([push_entry(Ref(key), first, blocks, final=final, restart=restart)])
        for layer in range(self.geometry.layers):
            self.write(layer, blocks)
            self.client.layer_done()

    def prompt(self, key: TransferKey, blocks: Sequence[int], token: int = 7, **expect: Any) -> None:
        """A whole prompt in one pass."""
        self.expect(key, **expect)
        self.run_pass(key, 0, blocks, final=True)
        self.client.first_token(Ref(key), token)

    # ---- token side

    def reserve(
        self,
        key: TransferKey,
        blocks: Sequence[int],
        *,
        at: str,
        source: str,
        first: int = 0,
        lease_ms: int = 60_000,
    ) -> None:
        self.client.reserve(
            Ref(key), first, blocks, source_kvd_address=at, source_engine_id=source, lease_ms=lease_ms
        )

    def cancel(self, key: TransferKey) -> None:
        self.client.cancel(Ref(key), "cancelled by the test")

    # ---- notices

    def notice(self, key: TransferKey, *, released: bool) -> Notice:
        """Wait for the one notice of a transfer on the prompt or the token side."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for notice in self.notices.get(key, []):
                if isinstance(notice, Released) == released:
                    return notice
            for notice in self.client.wait(0.5):
                self.notices.setdefault(notice.key, []).append(notice)
        raise AssertionError(f"{self.name}: no notice of {key} within {PATIENCE:g} s")

    def released(self, key: TransferKey) -> Any:
        return self.notice(key, released=True)

    def arrived(self, key: TransferKey) -> Any:
        return self.notice(key, released=False)


class Ref:
    def __init__(self, key: TransferKey) -> None:
        self.transfer_id, self.generation = key
