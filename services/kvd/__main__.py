"""``python -m services.kvd``: the KV daemon of one node."""

import sys

from services.kvd.service import serve
from splitwise.launch.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("kvd", "kvd", serve))
