"""What can be set on the vLLM engine."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic reads the annotations
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 1 << 30


class VllmSettings(BaseModel):
    """Settings of one engine; the defaults suit a laptop: one core, a small model, little memory."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: Path
    """Folder of a Hugging Face model."""
    model_name: str | None = None
    """The name that requests use; default: the folder's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights, activations and KV cache. With float32 a request's tokens do not depend on
    what else is in the batch."""
    block_tokens: int = Field(default=32, ge=1)
    """Tokens per KV block; on CPUs a multiple of 32."""
    kv_bytes: int = Field(default=GIB, ge=1 << 20)
    """Size of each rank's KV cache, in bytes."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest request, prompt plus output, in tokens; default: what the model was made for, at
    most what `kv_bytes` can hold."""
    max_running: int = Field(default=16, ge=1)
    """Requests in one batch."""
    max_batch_tokens: int = Field(default=2048, ge=1)
    """Tokens computed in one pass; longer prompts are computed in chunks (2,048 is the prompt
    batch limit in the Splitwise paper, section IV-B)."""
    prefix_caching: bool = True
    """Keep the KV blocks of finished requests for later ones that begin alike."""
    eager: bool = True
    """Run without compilation: starts in a fifth of the time; turn off for speed on GPUs."""
    threads: int = Field(default=1, ge=1)
    """Cores used by each rank of a CPU engine."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs (on CPUs: processes) over which each layer is spread, as in vLLM. Machines that hand KV
    caches to each other need the same number."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """More arguments for vLLM's ``AsyncEngineArgs``, taken as they are."""

    @model_validator(mode="after")
    def _extra_is_extra(self) -> VllmSettings:
        ours = sorted(set(self.extra) & RESERVED_ARGUMENTS)
        if ours:
            raise ValueError(f"extra: {', '.join(ours)} is set by this engine itself; use its own settings")
        return self


def settings_from_options(
    model: Path | None, model_name: str | None, options: Mapping[str, Any]
) -> VllmSettings:
    """Read a machine's model and ``engine.options``; raises `ConfigError` that names each wrong one."""
    if model is None:
        raise ConfigError("machine.model: the vllm engine needs the folder of a Hugging Face model")
    try:
        return VllmSettings(**{"model": model, "model_name": model_name, **options})
    except ValidationError as error:
        wrong = "; ".join(
            f"machine.engine.options.{'.'.join(map(str, part['loc']))}: {part['msg']}"
            for part in error.errors()
        )
        raise ConfigError(wrong) from error


# Arguments of AsyncEngineArgs that `VllmEngine` fills in.
RESERVED_ARGUMENTS = frozenset(
    {
        "block_size",
        "disable_log_stats",
        "dtype",
        "enable_prefix_caching",
        "enforce_eager",
        "kv_cache_memory_bytes",
        "kv_transfer_config",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "model",
        "pipeline_parallel_size",
        "served_model_name",
        "tensor_parallel_size",
    }
)
