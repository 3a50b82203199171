"""Settings of the emulated engine."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - pydantic reads it at run time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class EmulatedSettings(BaseModel):
    """What one emulated machine pretends to be. The defaults keep it at a few megabytes.

    The KV memory is `kv_blocks` x `layers` x `block_tokens` x `token_bytes_per_layer` bytes.
    It is deliberately smaller than the emulated model's: what is real is that every byte
    of it is written, moved and read back.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field("emulated", min_length=1, description="name that requests use")
    performance_model: str = Field(
        "llama2-70b", description="LLM whose phase times are emulated; a name from the model catalogue"
    )
    hardware: str = Field("h100-80gb", description="machine type from the hardware catalogue")
    tensor_parallel: int = Field(8, ge=1)
    time_scale: float = Field(
        1.0, ge=0.0, description="multiplies every emulated duration; 1 is real time, 0 takes no time"
    )
    max_model_len: int = Field(8192, ge=2, description="prompt plus output, in tokens")
    max_running: int = Field(128, ge=1, description="requests in the token phase at a time")
    max_batch_tokens: int = Field(
        2048, ge=1, description="tokens in an iteration with prompts: the prompts' and one per token phase"
    )
    max_preemptions: int = Field(
        4, ge=1, description="how often a token phase may have to sit an iteration out or give its memory up"
    )
    kv_blocks: int = Field(4096, ge=1)
    block_tokens: int = Field(16, ge=1, le=1024)
    layers: int = Field(4, ge=1, le=512)
    token_bytes_per_layer: int = Field(
        16, ge=8, description="KV bytes of one token in one layer; a multiple of 8"
    )
    vocab_size: int = Field(32_000, ge=512, description="made tokens are words: ids from 256")
    eos_probability: float = Field(
        0.0, ge=0.0, le=1.0, description="chance that a token ends the text; decided by its KV like any token"
    )

    gpu_file: Path | None = Field(None, description="the node's file of emulated GPUs (see docs/power.md)")
    gpus: tuple[str, ...] = Field((), description="UUIDs of this machine's GPUs in it")
    prefix_caching: bool = Field(False, description="keep full blocks for prompts that begin alike")

    @model_validator(mode="after")
    def _consistent(self) -> EmulatedSettings:
        if self.token_bytes_per_layer % 8:
            raise ValueError(
                f"token_bytes_per_layer is {self.token_bytes_per_layer}; it must be a multiple of 8"
            )
        if (self.gpu_file is None) != (not self.gpus):
            raise ValueError("gpu_file and gpus belong together: set both or none")
        if self.max_running >= self.max_batch_tokens:
            raise ValueError(
                f"max_running is {self.max_running}; it must be below max_batch_tokens "
                f"({self.max_batch_tokens}), or token phases could leave no room for a prompt"
            )
        return self

    @property
    def words(self) -> int:
        """64-bit words of KV of one token in one layer."""
        return self.token_bytes_per_layer // 8

    @property
    def eos_token_id(self) -> int:
        """The id that ends a text."""
        return self.vocab_size - 1


def settings_from_options(options: Mapping[str, Any]) -> EmulatedSettings:
    """Read a machine's ``engine.options``; raises `ConfigError` that names each wrong one."""
    try:
        return EmulatedSettings(**options)
    except ValidationError as error:
        wrong = "; ".join(
            f"machine.engine.options.{'.'.join(map(str, part['loc']))}: {part['msg']}"
            for part in error.errors()
        )
        raise ConfigError(wrong) from error
