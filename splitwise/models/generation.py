"""What a model's makers recommend for sampling: ``generation_config.json`` in its folder.

As in vLLM (``--generation-config auto``), a request that leaves one of these fields out gets
the model's own value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.errors import ConfigError
from splitwise.models.folder import read_json
from splitwise.requests import FieldError, check_sampling
from splitwise.rpc.v1.common_pb2 import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

# The fields that vLLM takes from the file and that a request can name.
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
FILE = "generation_config.json"


def read_sampling_defaults(folder: Path) -> SamplingParams:
    """Return the recommended fields, the others unset; empty without the file.

    Raises `ConfigError` that names the file and the field.
    """
    path = folder / FILE
    config = read_json(path, optional=True)
    defaults = SamplingParams()
    for field in FIELDS:
        value = config.get(field)
        if value is None:
            continue
        try:
            setattr(defaults, field, value)
        except (TypeError, ValueError):
            raise ConfigError(f"{path}: {field} is {value!r}, a number is needed") from None
    try:
        check_sampling(defaults)
    except FieldError as error:
        raise ConfigError(f"{path}: {error}") from None
    return defaults
