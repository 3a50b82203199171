"""Which packages an image needs: those of pyproject.toml without what its process never imports.

    python deploy/compose/requirements.py router > requirements.txt

One package list would put a compiler for kernels into the KV daemon's image and UCX into the
router's. The tests run every image's process with the left-out packages blocked.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
# Image to packages that are left out.
LEFT_OUT: dict[str, frozenset[str]] = {
    "router": frozenset({"cffi", "libucx-cu12"}),
    "kvd": frozenset({"aiohttp", "jinja2", "numba", "tokenizers"}),
    "machine-emulated": frozenset({"aiohttp", "cffi", "jinja2", "libucx-cu12", "tokenizers"}),
    "machine-cpu": frozenset({"libucx-cu12"}),  # vLLM itself needs the rest
    "machine-gpu": frozenset({"libucx-cu12"}),
}
# Image to the optional dependencies that it adds.
EXTRA = {"machine-cpu": "cpu", "machine-gpu": "gpu"}


def requirements(image: str) -> list[str]:
    """Return the requirement lines for `image`; raises `ValueError` for what pyproject.toml has not."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    lines: list[str] = project["dependencies"]
    names = {re.split(r"[^A-Za-z0-9._-]", line)[0]: line for line in lines}
    gone = LEFT_OUT[image] - names.keys()
    if gone:
        raise ValueError(
            f"{image} leaves out {', '.join(sorted(gone))}, which pyproject.toml does not ask for"
        )
    kept = [line for name, line in names.items() if name not in LEFT_OUT[image]]
    return kept + (project["optional-dependencies"][EXTRA[image]] if image in EXTRA else [])


def main() -> int:
    """Print the list; returns the exit status."""
    if len(sys.argv) != 2 or sys.argv[1] not in LEFT_OUT:
        print(f"usage: requirements.py IMAGE, with IMAGE one of {', '.join(LEFT_OUT)}", file=sys.stderr)
        return 2
    print("\n".join(requirements(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
