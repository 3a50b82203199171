"""Where things that took long to make are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: ``SPLITWISE_CACHE_DIR``, else ``splitwise`` in the XDG cache folder."""
    if override := os.environ.get("SPLITWISE_CACHE_DIR"):
        return Path(override).expanduser()
    # The XDG base directory specification says that a relative path is to be ignored.
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if xdg.startswith("/") else Path.home() / ".cache"
    return base / "splitwise"
