"""``python -m services.power``: the power agent of one node.

With ``--restore`` it only gives back the limits that an agent which died has left, and ends;
the exit code is 1 when some could not be.
"""

import sys

from services.power.service import check, restore, serve
from splitwise.config import load_settings
from splitwise.errors import ConfigError, ExitCode, ListenError
from splitwise.launch.service import run_service
from splitwise.telemetry import configure_logs


def main(arguments: list[str]) -> int:
    """Run the agent, or restore; returns the exit code."""
    if "--restore" not in arguments:
        return run_service("power", "power", serve, arguments, check=check)
    arguments.remove("--restore")
    try:
        settings = load_settings("power", arguments).settings
        configure_logs(settings.telemetry, service="power", name=settings.power.node)
        return ExitCode.FAILED if restore(settings.power) else ExitCode.OK
    except (ConfigError, ListenError) as error:
        print(f"splitwise power: {error}", file=sys.stderr)
        return ExitCode.CONFIG if isinstance(error, ConfigError) else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
