"""``python -m services.router``: the cluster scheduler and its front ends."""

import sys

from services.router.service import check, serve
from splitwise.launch.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("router", "router", serve, check=check))
