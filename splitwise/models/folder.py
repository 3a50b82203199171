"""What a model folder must hold to be served, read without loading the model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
# What config.json says about how the model was stored, not about what it computes.
_INCIDENTAL_KEYS = frozenset(
    {"_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"}
)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that was found usable.

    `identity` is equal for folders with the same configuration and weights, wherever they
    are: two engines that exchange KV blocks must have it in common.
    """

    path: Path
    name: str
    identity: str
    max_model_len: int  # positions that the model was made for
    vocab_size: int
    has_chat_template: bool


def read_model_folder(path: Path) -> ModelFolder:
    """Check a Hugging Face model folder; raises `ConfigError` that says what is missing."""
    if not path.is_dir():
        raise ConfigError(f"model folder {path}: not a folder; give a local Hugging Face model folder")
    config = read_json(path / "config.json")
    if not isinstance(config.get("architectures"), list):
        raise ConfigError(f"{path / 'config.json'}: names no `architectures`; is this a language model?")
    text = config.get("text_config") or config
    tokenizer = next((name for name in _TOKENIZERS if (path / name).is_file()), None)
    if tokenizer is None:
        raise ConfigError(f"model folder {path}: no tokenizer; one of {', '.join(_TOKENIZERS)} is needed")
    return ModelFolder(
        path=path.resolve(),
        name=path.resolve().name,
        identity=_identity(path, config),
        max_model_len=_positive(path, text, "max_position_embeddings"),
        vocab_size=_positive(path, text, "vocab_size"),
        has_chat_template=(path / "chat_template.jinja").is_file()
        or "chat_template" in read_json(path / "tokenizer_config.json", optional=True),
    )


def _positive(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path / 'config.json'}: `{key}` is {value!r}, a number above 0 is needed")
    return value


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object, empty for a missing `optional` file; raises `ConfigError` that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ConfigError(f"{path}: missing; give a local Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {type(value).__name__}, an object is needed")
    return value


def _identity(path: Path, config: dict[str, Any]) -> str:
    """Hash configuration and weights' index: names, shapes, types and places of all tensors, and sizes.

    The weights themselves are not read (that would take minutes for a large model), but a
    sample of each file is, so that a fine-tuned twin of equal shape is told apart.
    """
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"model folder {path}: no *.safetensors weights")
    digest = hashlib.sha256()
    kept = {key: value for key, value in config.items() if key not in _INCIDENTAL_KEYS}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for file in weights:
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(_sample(file))
    return digest.hexdigest()[:32]


def _sample(file: Path, pieces: int = 16, piece_bytes: int = 64 << 10) -> bytes:
    """Return the safetensors header (an 8-byte length, then JSON) and evenly spread pieces of the data."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > size - 8:
            raise ConfigError(f"{file}: not a safetensors file, or cut off ({size} bytes)")
        digest.update(stream.read(header_bytes))
        data_bytes = size - 8 - header_bytes
        for piece in range(pieces):
            stream.seek(8 + header_bytes + data_bytes * piece // pieces)
            digest.update(stream.read(min(piece_bytes, data_bytes)))
    return digest.digest()
