"""UCX for one thread and one asyncio loop: memory registration, endpoints, puts, active messages.

The worker sleeps in the kernel: its event descriptor is in the loop, and after each post
the worker is progressed until nothing moves and armed again. Settings that matter
(measured; see docs/kvd.md): RNDV_THRESH=inf, since with error handling on UCX otherwise
drops its zero-copy put lanes, and error handling mode PEER on every endpoint, since
without it a peer's death kills this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from services.kvd import ucp_abi as abi
from services.kvd.ucp_abi import ffi

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_PROGRESS_BUDGET_S = 0.002  # then other callbacks of the loop get their turn
# Signal handlers and debug hooks of UCX have no place in a service.
_ENVIRONMENT = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_ERROR_SIGNALS": "",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_DEBUG_SIGNO": "0",  # SIGHUP by default, which is ours: it reloads the settings
}


class UcxError(Exception):
    """A call of UCX failed."""


class PeerLostError(UcxError):
    """The endpoint's peer is dead, unreachable or was given up."""


class Registration:
    """Memory known to UCX. `rkey` is what a peer needs to write it."""

    def __init__(self, ucx: Ucx, address: int, nbytes: int, kind: str) -> None:
        params = ffi.new("ucp_mem_map_params_t *")
        params.field_mask = 1 | 2 | 16  # address, length, memory type
        params.address, params.length, params.memory_type = address, nbytes, abi.MEMORY_TYPES[kind]
        handle = ffi.new("uintptr_t *")
        ucx.check(
            ucx.lib.ucp_mem_map(ucx.context, params, handle), f"register {nbytes} bytes of {kind} memory"
        )
        self._ucx = ucx
        self._handle: int | None = handle[0]
        self.address, self.nbytes = address, nbytes
        self.put_param = ffi.new("ucp_request_param_t *")
        self.put_param.op_attr_mask = abi.OP_MEMH | abi.OP_MULTI_SEND
        self.put_param.memh = handle[0]

    def rkey(self) -> bytes:
        """Return the packed remote key."""
        buffer, size = ffi.new("uintptr_t *"), ffi.new("size_t *")
        lib = self._ucx.lib
        self._ucx.check(lib.ucp_rkey_pack(self._ucx.context, self._handle, buffer, size), "pack a remote key")
        packed = bytes(ffi.buffer(ffi.cast("char *", buffer[0]), size[0]))
        lib.ucp_rkey_buffer_release(buffer[0])
        return packed

    def close(self) -> None:
        """Deregister; no operation of this process may be using the memory. Idempotent."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._ucx.check(self._ucx.lib.ucp_mem_unmap(self._ucx.context, handle), "deregister memory")


class Endpoint:
    """A connection to one peer daemon. After `error` is set only `close` is of use."""

    def __init__(self, ucx: Ucx, peer_address: bytes) -> None:
        params = ffi.new("ucp_ep_params_t *")
        buffer = ffi.from_buffer(peer_address)
        params.field_mask = 1 | 2 | 4  # address, error mode, error handler
        params.address = int(ffi.cast("uintptr_t", buffer))
        params.err_mode = abi.ERROR_MODE_PEER
        params.error_callback = ucx.error_callback
        handle = ffi.new("uintptr_t *")
        ucx.check(ucx.lib.ucp_ep_create(ucx.worker, params, handle), "connect to a peer")
        self._ucx = ucx
        self.handle: int = handle[0]
        self.error: str | None = None
        self.on_error: Callable[[str], None] | None = None
        self._closing: asyncio.Future[None] | None = None
        ucx.endpoints[self.handle] = self

    def unpack_rkey(self, packed: bytes) -> int:
        """Make a peer's remote key usable on this endpoint; give it to `destroy_rkey` in the end."""
        self._require_alive()
        handle = ffi.new("uintptr_t *")
        self._ucx.check(self._ucx.lib.ucp_ep_rkey_unpack(self.handle, packed, handle), "unpack a remote key")
        return int(handle[0])

    def destroy_rkey(self, rkey: int) -> None:
        """Free a key; must precede the endpoint's close."""
        self._ucx.lib.ucp_rkey_destroy(rkey)

    def put(
        self,
        memory: Registration,
        rkey: int,
        local: Iterable[int],
        remote: Iterable[int],
        sizes: Iterable[int],
    ) -> None:
        """Post one put for each (local address, remote address, size). `flush` covers them all."""
        self._require_alive()
        post, free, handle = self._ucx.lib.ucp_put_nbx, self._ucx.lib.ucp_request_free, self.handle
        param = int(ffi.cast("uintptr_t", memory.put_param))
        try:
            for here, there, size in zip(local, remote, sizes, strict=True):
                request = post(handle, here, size, there, rkey, param)
                if request > 0 or request < abi.LOWEST_ERROR:
                    free(request)  # its end is covered by the flush
                elif request < 0:
                    raise PeerLostError(f"put of {size} bytes: {self._ucx.describe(request)}")
        finally:
            self._ucx.kick()

    def flush(self) -> asyncio.Future[None]:
        """Return a future that is done when all puts so far are in the peer's memory."""
        self._require_alive()
        return self._ucx.track(self._ucx.lib.ucp_ep_flush_nbx(self.handle, self._ucx.no_param), "flush")

    def send(self, message_id: int, header: bytes) -> asyncio.Future[None]:
        """Send an active message."""
        self._require_alive()
        buffer = ffi.new("char[]", header)
        request = self._ucx.lib.ucp_am_send_nbx(
            self.handle, message_id, buffer, len(header), 0, 0, self._ucx.no_param
        )
        return self._ucx.track(request, "send a message", keep=buffer)

    def close(self) -> asyncio.Future[None]:
        """Close by force: when the future is done, nothing of this endpoint touches memory here any more."""
        if self._closing is None:
            param = ffi.new("ucp_request_param_t *")
            param.op_attr_mask, param.flags = abi.OP_FLAGS, abi.CLOSE_FORCE
            self._ucx.endpoints.pop(self.handle, None)
            self.error = self.error or "closed here"
            self._closing = self._ucx.track(self._ucx.lib.ucp_ep_close_nbx(self.handle, param), "close")
        return self._closing

    def transports(self) -> list[str]:
        """Name the transports and devices in use; empty when this UCX cannot tell."""
        attributes = ffi.new("ucp_ep_attr_t *")
        entries = ffi.new("ucp_transport_entry_t[16]")
        attributes.field_mask = 8  # transports
        attributes.entries, attributes.num_entries = entries, len(entries)
        attributes.entry_size = ffi.sizeof("ucp_transport_entry_t")
        if self.error is not None or self._ucx.lib.ucp_ep_query(self.handle, attributes) != 0:
            return []
        names = (entries[number] for number in range(attributes.num_entries))
        return sorted({f"{_text(e.transport_name)}/{_text(e.device_name)}" for e in names})

    def _require_alive(self) -> None:
        if self.error is not None:
            raise PeerLostError(self.error)


class Ucx:
    """One UCX context and worker. Only the thread of the event loop may call it."""

    def __init__(self, library: str = "", transports: str = "", devices: str = "") -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.library = library or abi.default_library()
        try:
            self.lib = abi.load(self.library)
        except OSError as error:
            raise UcxError(
                f"cannot load UCX from {self.library}: {error}. Install libucx-cu12 or set the library's path"
            ) from error
        self.endpoints: dict[int, Endpoint] = {}
        self.no_param = ffi.new("ucp_request_param_t *")
        self.error_callback = ffi.callback("error_callback_t", self._endpoint_failed)
        self._handlers: list[Any] = []
        self._arrived: list[tuple[Callable[[bytes], None], bytes]] = []
        self._broken: list[tuple[int, str]] = []
        self._pending: list[tuple[int, asyncio.Future[None], str, Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        self.context = self._open_context(transports, devices)
        self.worker = self._open_worker()

    def _open_context(self, transports: str, devices: str) -> int:
        config = ffi.new("uintptr_t *")
        self.check(self.lib.ucp_config_read(ffi.NULL, ffi.NULL, config), "read the configuration")
        settings = {"RNDV_THRESH": "inf", "TLS": transports, "NET_DEVICES": devices}
        try:
            for name, value in settings.items():
                if value:
                    self.check(
                        self.lib.ucp_config_modify(config[0], name.encode(), value.encode()),
                        f"set {name}={value}",
                    )
            params = ffi.new("ucp_params_t *")
            params.field_mask = 1  # features
            params.features = abi.FEATURE_RMA | abi.FEATURE_AM | abi.FEATURE_WAKEUP
            context = ffi.new("uintptr_t *")
            status = self.lib.ucp_init_version(*abi.API_VERSION, params, config[0], context)
            self.check(status, f"start with transports '{transports or 'all'}', devices '{devices or 'all'}'")
        finally:
            self.lib.ucp_config_release(config[0])
        return int(context[0])

    def _open_worker(self) -> int:
        params = ffi.new("ucp_worker_params_t *")  # a zero mask: one thread
        worker = ffi.new("uintptr_t *")
        status = self.lib.ucp_worker_create(self.context, params, worker)
        if status != 0:
            self.lib.ucp_cleanup(self.context)
            self.check(status, "create a worker")
        return int(worker[0])

    # ---- what it is

    @property
    def version(self) -> str:
        """The loaded library's version."""
        numbers = ffi.new("unsigned[3]")
        self.lib.ucp_get_version(numbers, numbers + 1, numbers + 2)
        return ".".join(str(number) for number in numbers)

    def address(self) -> bytes:
        """Return the worker's address, which peers connect to."""
        attributes = ffi.new("ucp_worker_attr_t *")
        attributes.field_mask = 2  # address
        self.check(self.lib.ucp_worker_query(self.worker, attributes), "ask for the worker's address")
        raw = ffi.cast("char *", attributes.address)
        address = bytes(ffi.buffer(raw, attributes.address_length))
        self.lib.ucp_worker_release_address(self.worker, attributes.address)
        return address

    def describe(self, status: int) -> str:
        """Return UCX's text for a status."""
        return f"{_text(self.lib.ucs_status_string(status))} ({status})"

    def check(self, status: int, what: str) -> None:
        """Raise `UcxError` unless the status is OK."""
        if status != 0:
            raise UcxError(f"UCX cannot {what}: {self.describe(status)}")

    # ---- memory and peers

    def register(self, address: int, nbytes: int, kind: str = "memfd") -> Registration:
        """Register memory that stays mapped until the registration is closed."""
        return Registration(self, address, nbytes, kind)

    def connect(self, peer_address: bytes) -> Endpoint:
        """Open an endpoint to a peer's worker address."""
        endpoint = Endpoint(self, peer_address)
        self.kick()
        return endpoint

    def on_message(self, message_id: int, handler: Callable[[bytes], None]) -> None:
        """Call `handler(header)` in the loop for each active message of this id."""

        def arrived(_arg: int, header: Any, length: int, _data: int, _size: int, _param: int) -> int:
            self._arrived.append((handler, bytes(ffi.buffer(header, length))))
            return 0

        param = ffi.new("ucp_am_handler_param_t *")
        param.field_mask = 1 | 4  # id, callback
        param.id = message_id
        callback = ffi.callback("am_callback_t", arrived)
        param.callback = callback
        self._handlers.append(callback)  # UCX holds no reference
        self.check(self.lib.ucp_worker_set_am_recv_handler(self.worker, param), "set a message handler")

    # ---- the loop

    def start(self) -> None:
        """Enter the running event loop."""
        descriptor = ffi.new("int *")
        self.check(self.lib.ucp_worker_get_efd(self.worker, descriptor), "get its event descriptor")
        self._loop = asyncio.get_running_loop()
        self._event_fd = int(descriptor[0])
        self._loop.add_reader(self._event_fd, self._run)
        self.kick()

    def kick(self) -> None:
        """Progress soon: needed after each post, since only an armed worker wakes the loop."""
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._run)

    def track(self, request: int, what: str, keep: Any = None) -> asyncio.Future[None]:
        """Return a future for an operation's result. `keep` lives as long as the operation."""
        assert self._loop is not None, "Ucx.start was not called"  # noqa: S101 - a programming error
        future: asyncio.Future[None] = self._loop.create_future()
        future.add_done_callback(_consume)
        if request == 0:
            future.set_result(None)
        elif abi.LOWEST_ERROR <= request < 0:
            future.set_exception(PeerLostError(f"{what}: {self.describe(request)}"))
        else:
            self._pending.append((request, future, what, keep))
        self.kick()
        return future

    def _run(self) -> None:
        self._scheduled = False
        if self._loop is None:
            return  # scheduled before the close, which destroyed the worker
        progress, worker = self.lib.ucp_worker_progress, self.worker
        end = time.monotonic() + _PROGRESS_BUDGET_S
        while True:
            moved = progress(worker)
            if not moved:
                self._complete()
                status = self.lib.ucp_worker_arm(worker)
                if status == 0:
                    break
                if status != abi.ERR_BUSY:
                    self.check(status, "arm its worker")
            if time.monotonic() > end:
                self._complete()
                self.kick()
                break
        self._hand_over()

    def _complete(self) -> None:
        if not self._pending:
            return
        check, left = self.lib.ucp_request_check_status, []
        for item in self._pending:
            request, future, what, _ = item
            status = check(request)
            if status == abi.IN_PROGRESS:
                left.append(item)
                continue
            self.lib.ucp_request_free(request)
            if future.done():
                continue
            if status == 0:
                future.set_result(None)
            else:
                future.set_exception(PeerLostError(f"{what}: {self.describe(status)}"))
        self._pending = left

    def _hand_over(self) -> None:
        """Call handlers now, outside of UCX, where they may call UCX themselves."""
        broken, self._broken = self._broken, []
        for handle, why in broken:
            endpoint = self.endpoints.get(handle)
            if endpoint is not None and endpoint.error is None:
                endpoint.error = why
                if endpoint.on_error is not None:
                    endpoint.on_error(why)
        arrived, self._arrived = self._arrived, []
        for handler, header in arrived:
            handler(header)

    def _endpoint_failed(self, _arg: int, handle: int, status: int) -> None:
        self._broken.append((handle, self.describe(status)))

    async def close(self) -> None:
        """Close every endpoint, then the worker; all registrations must be closed before."""
        closing = [endpoint.close() for endpoint in list(self.endpoints.values())]
        if closing:
            await asyncio.wait(closing, timeout=2.0)
        if self._loop is not None:
            self._loop.remove_reader(self._event_fd)
            self._loop = None
        with contextlib.suppress(UcxError):
            self.lib.ucp_worker_destroy(self.worker)
            self.lib.ucp_cleanup(self.context)


def _consume(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()  # nobody may be waiting for it; that is no error of the loop's


def _text(raw: Any) -> str:
    text = ffi.string(raw)
    return text.decode() if isinstance(text, bytes) else str(text)
