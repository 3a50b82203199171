"""Generate the gRPC code in ``splitwise/rpc/v1`` from ``protos/``.

    python tools/generate_rpc.py           # write
    python tools/generate_rpc.py --check   # exit 1 when the checked-in code is not current

The protos keep their canonical path ``splitwise/v1/*.proto`` (that is what reflection
shows); the Python modules live one level deeper, beside the channels and the status
table, so the generated import lines are rewritten.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "splitwise" / "rpc" / "v1"
# Python module names only: the serialized descriptors hold the proto package's name too.
MODULE = re.compile(r"(?m)(?<=^from )splitwise\.v1(?= import)|splitwise\.v1(?=\.\w+_pb2\b)")


def generate(target: Path) -> None:
    """Compile every proto into `target` (message modules, type stubs, service stubs)."""
    with tempfile.TemporaryDirectory() as scratch:
        sources = sorted(str(path) for path in (PROTOS / "splitwise" / "v1").glob("*.proto"))
        include = str(files("grpc_tools") / "_proto")
        arguments = ["protoc", f"-I{PROTOS}", f"-I{include}", f"--python_out={scratch}"]
        arguments += [f"--mypy_out={scratch}", f"--grpc_python_out={scratch}", f"--mypy_grpc_out={scratch}"]
        if protoc.main(arguments + sources) != 0:
            raise SystemExit("protoc failed: see its message above")
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted((Path(scratch) / "splitwise" / "v1").iterdir()):
            (target / path.name).write_text(MODULE.sub("splitwise.rpc.v1", path.read_text()))


def main() -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only compare")
    if not parser.parse_args().check:
        generate(TARGET)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        names = [path.name for path in Path(scratch).iterdir()]
        _, changed, missing = filecmp.cmpfiles(scratch, TARGET, names, shallow=False)
    if changed or missing:
        print(f"not current: {sorted(changed + missing)}; run python tools/generate_rpc.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
