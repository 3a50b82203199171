"""Power capping, as far as it decides: the cap of each GPU, and the shares of a cluster's budget.

Pure: no I/O, clock or randomness. `splitwise.power.node` decides for one node's GPUs, in the
power agent; `splitwise.power.budget` shares the cluster's budget out, in the router. The rule
is the paper's HHcap (arXiv 2311.18677): the GPUs of token machines are capped to half their
power, which does not slow the token phase down; prompt machines are not capped, since the
prompt phase slows down under a cap.
"""

from splitwise.power.budget import BudgetKeeper, Demand, Order, Shares, Wishes, share_out
from splitwise.power.caps import Cap, Caps, GpuRange, Role
from splitwise.power.events import (
    Claimed,
    Event,
    GpuFound,
    GpuLost,
    LimitRead,
    Note,
    Released,
    Resumed,
    SetLimit,
    Suspended,
    Tick,
)
from splitwise.power.node import NodePower

__all__ = [
    "BudgetKeeper",
    "Cap",
    "Caps",
    "Claimed",
    "Demand",
    "Event",
    "GpuFound",
    "GpuLost",
    "GpuRange",
    "LimitRead",
    "NodePower",
    "Note",
    "Order",
    "Released",
    "Resumed",
    "Role",
    "SetLimit",
    "Shares",
    "Suspended",
    "Tick",
    "Wishes",
    "share_out",
]
