"""A node's power as machines, operators and routers see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.power import Role
from splitwise.rpc.v1.common_pb2 import PowerReport
from splitwise.rpc.v1.power_pb2 import GpuPower

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.power.nvml import Device, Reading
    from splitwise.power import NodePower


def describe_gpu(
    core: NodePower, device: Device, reading: Reading | None, machines: Sequence[str], problem: str
) -> GpuPower:
    """Return one GPU; without a reading it does not answer."""
    gpu = GpuPower(
        uuid=device.uuid,
        name=device.name,
        index=device.index,
        floor_watts=device.floor,
        highest_watts=device.highest,
        default_watts=device.default,
        machines=machines,
        problem=problem,
    )
    if reading is not None:
        gpu.requested_watts, gpu.reason = core.requested(device.uuid)
        gpu.previous_watts = core.previous(device.uuid)
        gpu.enforced_watts = reading.enforced
        gpu.draw_watts = reading.draw
    return gpu


def power_report(
    core: NodePower, machine_id: str, uuids: tuple[str, ...], gpus: Sequence[GpuPower], problem: str
) -> PowerReport:
    """Return a machine's GPUs together. Where no limit can be set, what is in force is all that counts."""
    enforced = sum(gpu.enforced_watts for gpu in gpus)
    report = PowerReport(
        gpus=len(gpus),
        requested_watts=sum(gpu.requested_watts for gpu in gpus),
        enforced_watts=enforced,
        draw_watts=sum(gpu.draw_watts for gpu in gpus),
        reason=", ".join(dict.fromkeys(gpu.reason for gpu in gpus if gpu.reason)),
        problem=problem or "; ".join(dict.fromkeys(gpu.problem for gpu in gpus if gpu.problem)),
    )
    fixed = bool(problem)
    report.floor_watts = enforced if fixed else core.least(uuids)
    report.wanted_watts = enforced if fixed else core.wanted(machine_id)
    for role in Role:
        setattr(report, f"{role.value}_watts", enforced if fixed else core.wishes(uuids, role))
    return report
