"""``python -m services.token``: a machine whose home is the token pool."""

import sys

from services.machine.service import serve_machine
from splitwise.launch.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("token", "machine", serve_machine(home="token")))
