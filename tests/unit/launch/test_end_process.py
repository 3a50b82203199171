"""A service that loaded a large library ends at once, and still in order."""

from __future__ import annotations

import subprocess
import sys

SOURCE = """
import atexit, sys
from splitwise.launch.service import end_process

class Slow:
    def __del__(self):
        print("taken apart")

kept = Slow()
atexit.register(print, "handler")
print("said", end="")
print("complained", file=sys.stderr, end="")
end_process(7)
"""


def test_handlers_run_and_output_is_written_and_nothing_else_happens() -> None:
    process = subprocess.run([sys.executable, "-c", SOURCE], capture_output=True, text=True, check=False)
    assert process.returncode == 7
    assert process.stdout == "saidhandler\n"
    assert process.stderr == "complained"
