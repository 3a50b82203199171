"""``python -m services.prompt``: a machine whose home is the prompt pool."""

import sys

from services.machine.service import serve_machine
from splitwise.launch.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("prompt", "machine", serve_machine(home="prompt")))
