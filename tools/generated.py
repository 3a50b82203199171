"""What the tools share that make a file of the repository from its sources."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def keep_current(target: Path, content: str, tool: str) -> int:
    """Write `content`, or with ``--check`` only compare; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="only compare")
    if not parser.parse_args().check:
        target.write_text(content)
        return 0
    if not target.exists() or target.read_text() != content:
        print(f"not current: {target.name}; run python tools/{tool}.py", file=sys.stderr)
        return 1
    return 0
