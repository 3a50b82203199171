"""How machines call their GPUs: numbers, UUIDs, and UUIDs cut short, as in CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.errors import InvalidRequestError, PreconditionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from services.power.nvml import Device


def resolve(words: Iterable[str], devices: Mapping[str, Device], node: str) -> tuple[str, ...]:
    """Return the UUIDs of the named GPUs, of all `devices` when none is named.

    Raises `PreconditionError` for one that is not there and `InvalidRequestError` for one that
    is named twice; both name the word.
    """
    by_index = {str(device.index): uuid for uuid, device in devices.items()}
    found: dict[str, str] = {}
    for place, word in enumerate(words):
        full = [uuid for uuid in devices if uuid.startswith(word)] if word.startswith("GPU-") else []
        uuid = full[0] if len(full) == 1 else by_index.get(word)
        if uuid is None:
            known = ", ".join(f"{index} ({uuid})" for index, uuid in by_index.items()) or "none that answers"
            raise PreconditionError(f"gpus[{place}]: {word[:80]!r} is no GPU of node {node}; it has {known}")
        if uuid in found:
            raise InvalidRequestError(
                f"gpus[{place}]: {word[:80]!r}: one GPU is named twice, also as {found[uuid]!r}"
            )
        found[uuid] = word
    return tuple(found) or tuple(devices)
