"""The agent: hears machines, asks `NodePower`, sets limits through the driver, reads them back.

Everything here blocks and is called from one thread (`services.power.service`). Before a
GPU's limit is changed for the first time, its previous one is on disk.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from services.power.describe import describe_gpu, power_report
from services.power.names import resolve
from services.power.nvml import Device, Fault, NvmlError, Reading
from splitwise.errors import StaleError
from splitwise.power import (
    Caps,
    Claimed,
    GpuFound,
    GpuLost,
    GpuRange,
    LimitRead,
    NodePower,
    Note,
    Released,
    Resumed,
    Role,
    SetLimit,
    Suspended,
    Tick,
)
from splitwise.rpc.v1 import power_pb2 as pb
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.power.limits_file import LimitsFile
    from services.power.nvml import Nvml
    from splitwise.config import PowerSettings
    from splitwise.power import Event

RESCAN_S = 10.0  # how often GPUs that did not answer are looked for
DIFFERS = 1.0  # watts between requested and enforced that are worth a word


class PowerAgent:
    """One node's GPUs."""

    def __init__(
        self,
        settings: PowerSettings,
        nvml: Nvml,
        kept: LimitsFile,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._nvml = nvml
        self._kept = kept
        self._clock = clock
        self._core = NodePower(_caps(settings), recap_after=settings.recap_after_s)
        self._devices: dict[str, Device] = {}  # every GPU that was ever there
        self._readings: dict[str, Reading] = {}  # of those that answer
        self._problems: dict[str, str] = {}
        self._set_errors: dict[str, str] = {}  # why a GPU's limit could not be set last time
        self._holds: dict[str, tuple[str, ...]] = {}  # machine to its GPUs
        self._reporting_only = "power.report_only is set" if settings.report_only else ""
        self._driver_problem = "not looked at yet"
        self._scanned_at = -RESCAN_S
        self._events: deque[Event] = deque()
        self._busy = False
        self.description = pb.PowerDescription()  # as of the last tick; replaced, never changed

    # ---- life

    def start(self) -> None:
        """Find the GPUs and give back what an earlier start of the agent left."""
        self._scan()
        if len(self._kept):
            get_logger().warning(
                "power.limits_still_owed", gpus=len(self._kept), remedy="they are set when the GPUs answer"
            )
        self.describe()

    def use(self, settings: PowerSettings) -> None:
        """Cap by these settings from now on."""
        self._settings = settings
        self._core.use(_caps(settings), recap_after=settings.recap_after_s)
        self._feed(Tick(self._clock()))

    def close(self) -> None:
        """Give every GPU its previous limit."""
        self._feed(Suspended(self._clock()))
        if len(self._kept):
            get_logger().error(
                "power.not_restored",
                gpus=len(self._kept),
                remedy="start the agent again: it restores them from its state file",
            )
        else:
            get_logger().info("power.restored")
        if not self._driver_problem:
            self._nvml.close()

    # ---- what machines and operators ask

    def hold(self, request: pb.HoldRequest, role: Role) -> pb.HoldResponse:
        """Take a machine's claim; raises `RemoteError`."""
        identity = request.identity
        if not self._core.accepts(identity.machine_id, identity.incarnation):
            raise StaleError(f"identity.incarnation: a newer incarnation of {identity.machine_id} is known")
        gpus = resolve(request.gpus, self._devices, self._settings.node)
        share = request.share_watts if request.share_watts > 0 else None
        self._holds[identity.machine_id] = gpus
        now, lease = self._clock(), request.lease_ms / 1e3
        known = self._core.machines.get(identity.machine_id)
        self._feed(Claimed(now, identity.machine_id, identity.incarnation, gpus, role, share, lease))
        if known != role:
            get_logger().info(
                "power.role", machine=identity.machine_id, role=role.value, gpus=len(gpus), share_watts=share
            )
        described = [self._describe_gpu(uuid) for uuid in gpus if uuid in self._devices]
        report = power_report(self._core, identity.machine_id, gpus, described, self.problem)
        return pb.HoldResponse(power=report, gpus=described)

    def release(self, machine_id: str, incarnation: int) -> None:
        """Take a machine's claim back."""
        self._feed(Released(self._clock(), machine_id, incarnation))

    def suspend(self, *, undo: bool) -> pb.PowerDescription:
        """Give all previous limits back until it is undone."""
        now = self._clock()
        self._feed(Resumed(now) if undo else Suspended(now))
        get_logger().warning("power.resumed" if undo else "power.suspended")
        return self.tick()

    def tick(self) -> pb.PowerDescription:
        """Read every GPU, let time pass, look for what is missing."""
        now = self._clock()
        missing = bool(self._driver_problem) or len(self._readings) < len(self._devices) or len(self._kept)
        if missing and now - self._scanned_at >= RESCAN_S:
            self._scan()
        for uuid in list(self._readings):
            self._read(self._devices[uuid])
        self._feed(Tick(now))
        return self.describe()

    def describe(self) -> pb.PowerDescription:
        """Return every GPU as last read, and what is asked of it now."""
        self.description = self._describe()
        return self.description

    @property
    def problem(self) -> str:
        """What keeps the agent from its work, if anything."""
        suspended = "an operator has suspended capping" if self._core.suspended else ""
        return self._driver_problem or self._reporting_only or suspended

    # ---- the driver

    def _scan(self) -> None:
        """Look for GPUs; take up those that answer and were not known to."""
        self._scanned_at = self._clock()
        try:
            if self._driver_problem:
                self._nvml.open()
                self._driver_problem = ""
            devices, problems = self._nvml.devices()
        except NvmlError as error:
            if self._driver_problem != str(error):
                get_logger().error("power.driver_unavailable", error=str(error))
            self._driver_problem = str(error)
            return
        for problem in problems:
            if str(problem) not in self._problems:
                self._problems[str(problem)] = problem.fault.value
                get_logger().warning("power.gpu_unusable", fault=problem.fault.value, error=str(problem))
        for device in devices:
            self._devices[device.uuid] = device
            if device.uuid not in self._readings:
                self._take_up(device)

    def _take_up(self, device: Device) -> None:
        try:
            reading = self._nvml.read(device)
        except NvmlError as error:
            self._failed(device, error)
            return
        self._readings[device.uuid] = reading
        self._problems.pop(device.uuid, None)
        owed = self._kept.get(device.uuid)
        previous = reading.limit if owed is None else owed
        limits = GpuRange(device.floor, device.highest, device.default, previous)
        get_logger().info(
            "power.gpu_found",
            gpu=device.uuid,
            limit_watts=reading.limit,
            range_watts=[device.floor, device.highest],
            owed_watts=owed,
        )
        self._feed(GpuFound(self._clock(), device.uuid, limits, reading.limit))

    def _read(self, device: Device) -> None:
        try:
            self._readings[device.uuid] = self._nvml.read(device)
        except NvmlError as error:
            self._failed(device, error)
            return
        limit = self._readings[device.uuid].limit
        if limit != self._core.limit(device.uuid):
            self._feed(LimitRead(self._clock(), device.uuid, limit))
        self._compare(device)

    def _compare(self, device: Device) -> None:
        """Say once when the driver enforces another limit than was asked for."""
        if device.uuid not in self._readings or self._reporting_only:
            return
        requested, _ = self._core.requested(device.uuid)
        enforced = self._readings[device.uuid].enforced
        if abs(requested - enforced) < DIFFERS:
            self._problems.pop(device.uuid, None)
            return
        error = self._set_errors.get(device.uuid)
        problem = error or f"{enforced:g} W are enforced, {requested:g} W were requested"
        before = self._problems.get(device.uuid)
        self._problems[device.uuid] = problem
        if error is None and before != problem:
            remedy = "another limiter is lower: see nvidia-smi -q -d POWER"
            get_logger().warning("power.enforced_differs", gpu=device.uuid, error=problem, remedy=remedy)

    def _failed(self, device: Device, error: NvmlError) -> None:
        """A call about a GPU failed: it cannot be read, so it counts as lost."""
        if self._problems.get(device.uuid) != str(error):
            get_logger().error("power.gpu_failed", gpu=device.uuid, fault=error.fault.value, error=str(error))
        self._problems[device.uuid] = str(error)
        if self._readings.pop(device.uuid, None) is not None:
            self._feed(GpuLost(self._clock(), device.uuid))

    # ---- decisions

    def _feed(self, event: Event) -> None:
        """Give the core one event and carry out what it decides, and what comes of that."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                decisions = self._core.handle(self._events.popleft())
                for note in [one for one in decisions if isinstance(one, Note)]:
                    self._note(note)
                self._set([one for one in decisions if isinstance(one, SetLimit)])
        finally:
            self._busy = False
        answering = [uuid for uuid in self._kept.names() if uuid in self._readings]
        self._forget([uuid for uuid in answering if not self._core.owes(uuid)])

    def _note(self, note: Note) -> None:
        get_logger().warning("power.note", code=note.code, subject=note.subject, message=note.message)

    def _set(self, decisions: Sequence[SetLimit]) -> None:
        """Set limits, once the previous ones are kept, and read each back."""
        kept = not self._reporting_only and self._keep([decision.uuid for decision in decisions])
        for decision in decisions:
            device = self._devices[decision.uuid]
            if kept:
                self._change(device, decision)
            if device.uuid in self._readings:
                self._read(device)

    def _keep(self, uuids: Sequence[str]) -> bool:
        """Keep GPUs' previous limits; False when that failed, and nothing may be set."""
        try:
            self._kept.remember({uuid: self._core.previous(uuid) for uuid in uuids})
        except OSError as error:
            for uuid in uuids:
                self._not_set(uuid, f"not set: power.state cannot be written: {error}", Fault.OTHER)
            return False
        return True

    def _change(self, device: Device, decision: SetLimit) -> None:
        if self._reporting_only:
            return
        try:
            self._nvml.set_limit(device, decision.watts)
        except NvmlError as error:
            if error.fault is Fault.NO_PERMISSION:
                self._report_only(error)
            elif error.fault is Fault.LOST:
                self._failed(device, error)
            else:
                self._not_set(device.uuid, str(error), error.fault)
        else:
            self._set_errors.pop(device.uuid, None)
            get_logger().debug(
                "power.limit_set", gpu=device.uuid, watts=decision.watts, reason=decision.reason
            )

    def _not_set(self, uuid: str, error: str, fault: Fault) -> None:
        if self._set_errors.get(uuid) != error:
            get_logger().error("power.limit_not_set", gpu=uuid, fault=fault.value, error=error)
        self._set_errors[uuid] = error

    def _report_only(self, error: NvmlError) -> None:
        """Without permission nothing is set any more; what an earlier start changed stays owed."""
        self._reporting_only = str(error)
        get_logger().warning("power.reporting_only", error=str(error))
        readings = self._readings.items()
        self._forget([uuid for uuid, reading in readings if self._kept.get(uuid) == reading.limit])

    def _forget(self, uuids: Sequence[str]) -> None:
        try:
            self._kept.forget(uuids)
        except OSError as error:  # it is tried again with the next event
            for uuid in uuids:
                self._not_set(uuid, f"power.state cannot be written: {error}", Fault.OTHER)

    # ---- descriptions

    def _describe_gpu(self, uuid: str) -> pb.GpuPower:
        machines = [name for name in self._core.machines if uuid in self._holds.get(name, ())]
        problem = self._problems.get(uuid, "")
        return describe_gpu(self._core, self._devices[uuid], self._readings.get(uuid), machines, problem)

    def _describe(self) -> pb.PowerDescription:
        settings = self._settings
        self._holds = {name: gpus for name, gpus in self._holds.items() if name in self._core.machines}
        return pb.PowerDescription(
            node=settings.node,
            driver=self._nvml.driver,
            reporting_only=bool(self._reporting_only),
            suspended=self._core.suspended,
            problem=self.problem,
            gpus=[self._describe_gpu(uuid) for uuid in self._devices],
            prompt_cap=str(settings.prompt_cap),
            token_cap=str(settings.token_cap),
            mixed_cap=str(settings.mixed_cap),
        )


def _caps(settings: PowerSettings) -> Caps:
    return Caps(settings.prompt_cap, settings.token_cap, settings.mixed_cap)
