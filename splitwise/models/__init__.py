"""Model folders: where they are cached, how the default model is made, what a usable folder holds.

Importing this package loads neither torch nor transformers; making the default model does
so in a process of its own.
"""

from splitwise.models.cache import cache_dir
from splitwise.models.default import DEFAULT_MODEL_NAME, prepare_default_model
from splitwise.models.folder import ModelFolder, read_model_folder
from splitwise.models.generation import read_sampling_defaults

__all__ = [
    "DEFAULT_MODEL_NAME",
    "ModelFolder",
    "cache_dir",
    "prepare_default_model",
    "read_model_folder",
    "read_sampling_defaults",
]
