"""Machines come and go: registration, connection, leases."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from services.router.link import MachineLink
from splitwise.config import Address
from splitwise.config.schema import NAME
from splitwise.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    PreconditionError,
    RemoteError,
    StaleError,
    UnavailableError,
)
from splitwise.rpc.v1.common_pb2 import POOL_PROMPT, POOL_TOKEN
from splitwise.rpc.v1.machine_pb2 import Hello
from splitwise.scheduling.events import MachineSpec, Pool
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from services.router.dispatcher import Dispatcher
    from services.router.models import Model, Models
    from splitwise.config import RouterSettings, TlsSettings
    from splitwise.rpc.v1.common_pb2 import LoadReport, MachineDescription
    from splitwise.scheduling.decisions import RefuseMachine

RETRY_S = 0.5
HOMES = {POOL_PROMPT: Pool.PROMPT, POOL_TOKEN: Pool.TOKEN}


class Registry:
    """The machines of one router."""

    def __init__(
        self, settings: RouterSettings, tls: TlsSettings, dispatcher: Dispatcher, models: Models
    ) -> None:
        self.settings = settings
        self._tls = tls
        self._dispatcher = dispatcher
        self._models = models
        # A lock lives as long as somebody holds or awaits it: ids that are made up leave nothing.
        self._joining: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closing: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.closed = False

    def start(self) -> None:
        """Connect to the machines of the settings, and watch leases."""
        self._tasks.append(asyncio.create_task(self._watch_leases(), name="leases"))
        for address in self.settings.machines:
            self._tasks.append(asyncio.create_task(self._keep_connected(address), name=f"dial-{address}"))

    async def close(self) -> None:
        """Break every connection."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        links = list(self._dispatcher.links.values())
        await asyncio.gather(*[link.close() for link in links], *self._closing, return_exceptions=True)

    async def register(self, machine: MachineDescription, load: LoadReport) -> None:
        """A machine announces itself or renews its lease; raises `RemoteError` with what to change."""
        if self.closed:
            raise UnavailableError("the router stops", retry_after=RETRY_S)
        address = _check(machine)
        machine_id = machine.identity.machine_id
        async with self._joining.setdefault(machine_id, asyncio.Lock()):
            link = self._dispatcher.links.get(machine_id)
            if link is not None and self._renews(link, machine):
                link.heard_at = time.monotonic()
                return
            del load  # the control stream brings reports from its first moment
            await self._connect(address, machine)

    def _renews(self, link: MachineLink, machine: MachineDescription) -> bool:
        """Whether this is the machine that is known; raises for one that may not take its place."""
        known = link.description
        if known is None:
            return False
        mine, theirs = known.identity.incarnation, machine.identity.incarnation
        if theirs < mine:
            raise StaleError(
                f"machine.identity.incarnation: {theirs} of {machine.identity.machine_id} is older than"
                f" {mine}, which is connected"
            )
        if theirs == mine:
            if known.address != machine.address:
                raise _conflict(machine, known.address)
            return True
        if known.address != machine.address and not self._silent(link):
            raise _conflict(machine, known.address)
        return False

    def _silent(self, link: MachineLink) -> bool:
        quiet_s = time.monotonic() - link.heard_at
        return link.lost or quiet_s > 3 * self.settings.load_report_ms / 1e3 + 0.2

    async def _connect(self, address: Address, announced: MachineDescription | None) -> MachineLink:
        """Return the link to the machine at `address`: a new one, or the one that it has already."""
        hello = Hello(router_id=self.settings.router_id, load_report_ms=self.settings.load_report_ms)
        link = MachineLink(address, self._tls, hello, ping_timeout_ms=self.settings.machine_ping_timeout_ms)
        try:
            machine = await link.open()
            _check(machine)
            _check_same(machine, announced)
            model = await self._models.read(machine)
            joined = self._take_up(link, machine, model)
        except BaseException:  # cancelled by a caller that went away, too
            self._close_later(link)
            raise
        if joined is not link:
            self._close_later(link)
        return joined

    def _take_up(self, link: MachineLink, machine: MachineDescription, model: Model) -> MachineLink:
        """Put an open link to use, in one step: in place of an older incarnation's, or not at all."""
        machine_id = machine.identity.machine_id
        known = self._dispatcher.links.get(machine_id)
        if known is not None:
            if self._renews(known, machine):
                return known
            self._dispatcher.lose(known, "a newer incarnation took its place")
            self._close_later(known)
        refusal = self._dispatcher.join(link, _spec(machine))
        if refusal is not None:
            raise self._refused(machine, refusal)
        descriptions = (other.description for other in self._dispatcher.links.values())
        users = [one for one in descriptions if one is not None and one.model == machine.model]
        self._models.learn(model, alone=len(users) == 1)
        link.heard_at = time.monotonic()
        link.start(self._dispatcher.take, self._on_lost)
        get_logger().info(
            "machine.joined",
            machine=machine_id,
            home=HOMES[machine.home_pool].value,
            model=machine.model,
            address=str(link.address),
        )
        return link

    def _refused(self, machine: MachineDescription, refusal: RefuseMachine) -> RemoteError:
        name = machine.identity.machine_id
        if refusal.code == "kv_fingerprint":
            return PreconditionError(
                f"machine.kv_fingerprint: the KV blocks of {name} do not fit those of the other machines"
                f" of model {machine.model!r}: {self._difference(machine)}"
            )
        if refusal.code == "stale_incarnation":
            return StaleError(f"machine.identity.incarnation: a newer incarnation of {name} is known")
        if refusal.code == "identity_conflict":
            return AlreadyExistsError(f"machine.identity: {name} is connected with another description")
        return InvalidRequestError(f"machine: the description of {name} is refused ({refusal.code})")

    def _difference(self, machine: MachineDescription) -> str:
        for link in self._dispatcher.links.values():
            other = link.description
            if other is None or other.model != machine.model:
                continue
            mine, theirs = (dict(f.partition("=")[::2] for f in d.kv_facts) for d in (machine, other))
            names = [n for n in {**mine, **theirs} if mine.get(n) != theirs.get(n)]
            parts = [f"{n} is {mine.get(n, '?')} here and {theirs.get(n, '?')} there" for n in names]
            return "; ".join(parts) or "the fingerprints differ"
        return "the fingerprints differ"

    def _on_lost(self, link: MachineLink, reason: str) -> None:
        self._dispatcher.lose(link, reason)
        self._close_later(link)

    def _close_later(self, link: MachineLink) -> None:
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _keep_connected(self, address: Address) -> None:
        """Dial a machine of the settings for ever; says each problem once."""
        said = ""
        while True:
            try:
                link = await self._connect(address, None)
                said = ""
                while not link.lost:  # noqa: ASYNC110 - a machine is lost in several ways
                    await asyncio.sleep(RETRY_S)
            except RemoteError as error:
                if error.message != said:
                    get_logger().warning("machine.unreachable", address=str(address), error=error.message)
                    said = error.message
            await asyncio.sleep(RETRY_S)

    async def _watch_leases(self) -> None:
        """Lose machines that send nothing although they answer pings: their event loop hangs."""
        while True:
            lease_s = self.settings.machine_lease_ms / 1e3
            step = min(0.2, lease_s / 4)
            began = time.monotonic()
            await asyncio.sleep(step)
            now = time.monotonic()
            late = now - began - step
            for link in list(self._dispatcher.links.values()):
                if late > step:  # this process stood still: what it has not read yet is not silence
                    link.heard_at += late
                if now - link.heard_at > lease_s and not link.lost:
                    link.lost = True
                    self._on_lost(link, f"silent for {lease_s:g} s")


def _check(machine: MachineDescription) -> Address:
    """Return the machine's address; raises `InvalidRequestError` that names the field at fault."""
    if not re.fullmatch(NAME, machine.identity.machine_id):
        raise InvalidRequestError(
            f"machine.identity.machine_id: {machine.identity.machine_id[:80]!r} is not a name"
            " (1 to 64 of A-Z a-z 0-9 . _ -)"
        )
    if machine.home_pool not in HOMES:
        raise InvalidRequestError(
            f"machine.home_pool: {machine.home_pool} is no home; a machine is at home in POOL_PROMPT or"
            " POOL_TOKEN"
        )
    for field in ("model", "kv_fingerprint", "kvd_address", "engine_id"):
        if not getattr(machine, field):
            raise InvalidRequestError(f"machine.{field}: empty")
    for field in ("max_model_len", "kv_blocks", "block_tokens", "max_running"):
        if not getattr(machine, field):
            raise InvalidRequestError(f"machine.{field}: must be at least 1")
    _address("kvd_address", machine.kvd_address)
    return _address("address", machine.address)


def _address(field: str, text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise InvalidRequestError(f"machine.{field}: {error}") from None


def _check_same(there: MachineDescription, announced: MachineDescription | None) -> None:
    if announced is not None and there.identity != announced.identity:
        raise StaleError(
            f"machine.address: at {announced.address} there is {there.identity.machine_id}, incarnation"
            f" {there.identity.incarnation}, not the machine that registered"
        )


def _conflict(machine: MachineDescription, known: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"machine.identity.machine_id: {machine.identity.machine_id} is connected at {known}, this one says"
        f" {machine.address}: give every machine its own id"
    )


def _spec(machine: MachineDescription) -> MachineSpec:
    return MachineSpec(
        machine_id=machine.identity.machine_id,
        incarnation=machine.identity.incarnation,
        home=HOMES[machine.home_pool],
        model=machine.model,
        kv_fingerprint=machine.kv_fingerprint,
        node=machine.node,
        kv_blocks=machine.kv_blocks,
        block_tokens=machine.block_tokens,
        max_running=machine.max_running,
    )
