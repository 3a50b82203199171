"""Telling systemd how a service fares: ready, stopping, alive (the protocol of sd_notify(3)).

Does nothing when the service was not started by systemd. The watchdog's message is sent from
the event loop, so that a loop that hangs is noticed and the service started again.
"""

from __future__ import annotations

import asyncio
import os
import socket

SOCKET = "NOTIFY_SOCKET"
WATCHDOG_USEC, WATCHDOG_PID = "WATCHDOG_USEC", "WATCHDOG_PID"


def notify(state: str) -> bool:
    """Send one state, such as ``READY=1``; False when there is nobody to tell."""
    address = os.environ.get(SOCKET, "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(state.encode(), address)
        except OSError:
            return False
    return True


def watchdog_period_s() -> float | None:
    """Return how often systemd wants to hear of this process: half its limit; None: not at all."""
    limit = os.environ.get(WATCHDOG_USEC, "")
    wanted = os.environ.get(WATCHDOG_PID, str(os.getpid()))
    if not limit.isdigit() or int(limit) == 0 or wanted != str(os.getpid()):
        return None
    return int(limit) / 2e6


async def keep_alive() -> None:
    """Send the watchdog's message for ever, if it is wanted."""
    period = watchdog_period_s()
    while period is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(period)
