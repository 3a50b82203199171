"""``python -m services.token``: a machine whose home is the token pool."""

from services.machine.service import check, serve_machine
from splitwise.launch.service import end_process, run_service

if __name__ == "__main__":
    end_process(run_service("token", "machine", serve_machine(home="token"), check=check))
