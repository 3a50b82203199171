"""Found on PYTHONPATH at the start of a process: packages that its image lacks cannot be imported here."""

import os
import sys

for name in os.environ.get("BLOCKED_PACKAGES", "").split():
    sys.modules[name] = None  # type: ignore[assignment]  # how Python is told that there is no such module
