"""How vLLM lays out KV blocks, in the contract's words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.rpc.v1.kvd_pb2 import KvGeometry

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class UnsupportedModelError(Exception):
    """The model's KV cache is of a kind that this engine does not move."""


def geometry_of(
    config: KVCacheConfig,
    *,
    block_tokens: int,
    dtype: str,
    model: str,
    backend: str,
    tp_rank: int,
    tp_size: int,
) -> KvGeometry:
    """Describe one rank's KV cache as vLLM planned it; raises `UnsupportedModelError`.

    One group of layers in one allocation is what all models with plain full attention have.
    Hybrid ones (sliding windows, state space, latent attention in several groups) hold
    several kinds of blocks per request.
    """
    if len(config.kv_cache_groups) != 1 or len(config.kv_cache_tensors) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups})
        raise UnsupportedModelError(
            f"the model has {len(config.kv_cache_groups)} groups of KV blocks ({', '.join(kinds)}); "
            "only models with one can be split over two machines"
        )
    tensor = config.kv_cache_tensors[0]
    return KvGeometry(
        layers=len(tensor.layers),
        num_blocks=config.num_blocks,
        block_bytes_per_layer=config.kv_cache_groups[0].kv_cache_spec.page_size_bytes,
        layer_stride_bytes=tensor.layer_stride,
        block_stride_bytes=tensor.block_stride,
        base_offset=tensor.offset,
        block_tokens=block_tokens,
        dtype=dtype,
        layout=str(config.kv_cache_layout),
        model=model,
        backend=backend,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


def facts(geometry: KvGeometry) -> list[str]:
    """List what must be equal on two engines that exchange blocks, as ``name=value``."""
    names = (
        "model",
        "dtype",
        "layout",
        "backend",
        "layers",
        "block_tokens",
        "block_bytes_per_layer",
        "tp_size",
    )
    return [f"{name}={getattr(geometry, name)}" for name in names]
