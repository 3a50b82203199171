"""``python -m services.prompt``: a machine whose home is the prompt pool."""

from services.machine.service import check, serve_machine
from splitwise.launch.service import end_process, run_service

if __name__ == "__main__":
    end_process(run_service("prompt", "machine", serve_machine(home="prompt"), check=check))
