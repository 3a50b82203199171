"""The settings themselves: sections, fields, defaults and bounds.

One YAML file may hold the sections of all processes; each process reads its own, `tls` and
`telemetry`. Durations are seconds (`_s`) or milliseconds (`_ms`), sizes are bytes. Every
process listens on loopback unless it is told otherwise. A field marked `LIVE` is taken up by
a running process that reloads its settings; all others count from its next start.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    model_validator,
)

from splitwise.config.address import Address
from splitwise.power.caps import Cap


def _split(value: object) -> object:
    """Let a list be written as comma-separated text, as flags and variables do."""
    return (
        tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
    )


def _cap(value: object) -> object:
    """Read a power cap from its text; null is none."""
    if value is None:
        return Cap()
    return Cap.parse(value) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
PowerCap = Annotated[Cap, BeforeValidator(_cap), PlainSerializer(str)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(_split)]
NAME = r"[A-Za-z0-9._-]{1,64}"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]


class Live:
    """The marker of a field that a running process takes up."""


LIVE = Live()


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values cannot be changed later."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class EngineKind(StrEnum):
    """Which engine a machine runs."""

    VLLM = "vllm"
    EMULATED = "emulated"


class LogFormat(StrEnum):
    """How log lines look. `auto`: readable on a terminal, else JSON."""

    AUTO = "auto"
    JSON = "json"
    READABLE = "readable"


class HomePool(StrEnum):
    """The pool a machine belongs to when it is not borrowed."""

    PROMPT = "prompt"
    TOKEN = "token"  # noqa: S105 - the pool, not a secret


class SloSettings(Section):
    """Service-level objectives: 90th percentiles in milliseconds; null: none."""

    ttft_ms: Annotated[float | None, LIVE] = Field(default=None, gt=0)
    """Arrival to first token."""
    second_ms: Annotated[float | None, LIVE] = Field(default=None, gt=0)
    """First to second token."""
    tbt_ms: Annotated[float | None, LIVE] = Field(default=None, gt=0)
    """Mean time between later tokens."""
    e2e_ms: Annotated[float | None, LIVE] = Field(default=None, gt=0)
    """Arrival to last token."""


class RouterSettings(Section):
    """The cluster scheduler and its gRPC and HTTP front ends."""

    listen: Address = Address("127.0.0.1", 7400)
    """Where clients, operators and machines reach the router (gRPC)."""
    http_listen: Address | None = None
    """Where the OpenAI-compatible gateway and the dashboard listen; null turns them off."""
    http_api_keys: Annotated[Path | None, LIVE] = None
    """File with the API keys that the gateway takes, one a line; null: none is asked for. It is
    read again at every reload."""
    http_body_bytes: Annotated[int, LIVE] = Field(default=16 * 1024 * 1024, ge=1024)
    """The largest request body that the gateway takes."""
    slo: SloSettings = SloSettings()
    """What the dashboard measures latencies against."""
    router_id: Name = "router"
    """This router's name in the machines' logs."""
    models: dict[str, Path] = Field(default_factory=dict)
    """Model name to the local folder with its tokenizer and chat template."""
    machines: Addresses = ()
    """Machines to connect to that do not register by themselves."""
    policy: Annotated[str, LIVE] = "jsq"
    """How machines are chosen (see docs/scheduler.md)."""
    queue_tokens: Annotated[int, LIVE] = Field(default=8192, ge=1)
    """A machine with work takes a prompt up to so many pending tokens; beyond it the mixed pool
    and then the opposite pool are asked (value: SplitwiseSim)."""
    last_resort_tokens: Annotated[int, LIVE] = Field(default=32_768, ge=1)
    """The same bound when one machine takes both phases; beyond it requests wait."""
    borrow_hold_ms: Annotated[int, LIVE] = Field(default=500, ge=0)
    """A borrowed machine stays in the mixed pool so long after its last work of the other kind."""
    queue_limit: Annotated[int, LIVE] = Field(default=4096, ge=0)
    """Requests that may wait for an assignment; beyond it RESOURCE_EXHAUSTED."""
    serialized_below_tokens: Annotated[int, LIVE] = Field(default=512, ge=0)
    """Prompts shorter than this push their KV cache after the prompt, others layer by layer
    (512 on H100, Splitwise paper section IV-C)."""
    message_gap_ms: Annotated[int, LIVE] = Field(default=5, ge=0)
    """A client gets its next message so long after the last at the earliest, with all tokens
    since. Only engines that make a token faster than that are affected; 0: never wait."""
    restart_limit: Annotated[int, LIVE] = Field(default=5, ge=0)
    """How often one request may be started again after failures."""
    load_report_ms: int = Field(default=200, ge=10)
    """How often machines report their queues."""
    heartbeat_ms: Annotated[int, LIVE] = Field(default=1000, ge=50)
    """How often machines renew their registration."""
    machine_lease_ms: Annotated[int, LIVE] = Field(default=5000, ge=100)
    """A machine that answers pings but sends nothing for so long hangs, and is lost."""
    machine_ping_timeout_ms: Annotated[int, LIVE] = Field(default=600, ge=100)
    """A machine whose process or host does not answer a ping for so long is lost. Pings go out
    every 200 ms; busy engines answer them, since gRPC's own threads do."""
    transfer_lease_ms: Annotated[int, LIVE] = Field(default=60_000, ge=100)
    """The KV cache must have arrived within this time after the assignment."""
    power_budget_watts: Annotated[float | None, LIVE] = Field(default=None, gt=0)
    """Power limits of all GPUs together, in watts, shared out by the router (see docs/power.md);
    null: no budget."""
    request_log: Path | None = None
    """File that gets one JSON line for each finished request: sizes and times, never contents
    (see docs/router.md); null: none."""
    event_log: Path | None = None
    """File that gets all that the scheduler was told and decided, for `splitwise replay`
    (see docs/router.md); null: none."""
    event_log_bytes: int = Field(default=64 * 1024 * 1024, ge=4096)
    """Size at which the event log begins again; the full one is kept as FILE.1."""
    drain_s: Annotated[float, LIVE] = Field(default=120.0, ge=0)
    """After SIGTERM, how long running requests may take to finish."""

    @model_validator(mode="after")
    def _lease_outlives_heartbeat(self) -> RouterSettings:
        if self.machine_lease_ms < 2 * self.heartbeat_ms:
            raise ValueError(
                f"machine_lease_ms ({self.machine_lease_ms}) must be at least twice"
                f" heartbeat_ms ({self.heartbeat_ms}), or one late heartbeat loses the machine"
            )
        return self


class EngineSettings(Section):
    """What computes. `options` go to the engine as they are (see docs/engine-vllm.md)."""

    kind: EngineKind = EngineKind.VLLM
    """Which engine: vllm (a real model) or emulated (no model, the same time and bytes)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments by name; an unknown one is refused by the engine at start."""


class MachineSettings(Section):
    """One engine with its prompt service and token service."""

    id: Name = "machine"
    """Unique in the cluster."""
    home_pool: HomePool = HomePool.PROMPT
    """prompt or token; both phases are served in either."""
    listen: Address = Address("127.0.0.1", 0)
    """Where routers reach this machine (gRPC)."""
    advertise: Address | None = None
    """The address that routers are told; default: the one it listens on."""
    routers: Addresses = (Address("127.0.0.1", 7400),)
    """Routers to register with."""
    kvd_socket: Path = Path("/run/splitwise/kvd.sock")
    """The Unix socket of the node's KV daemon."""
    kvd_address: Address = Address("127.0.0.1", 7500)
    """The gRPC address of the node's KV daemon, as other nodes reach it."""
    node: Name = "node"
    """The node's name; machines of one node share a KV daemon."""
    model: Path | None = None
    """Folder of a Hugging Face model; needed by the vllm engine."""
    model_name: str | None = None
    """The name that requests use; default: the folder's name."""
    engine: EngineSettings = EngineSettings()
    """Which engine runs, and its options."""
    power_agent: Address | None = None
    """The node's power agent, which caps this machine's GPUs by its pool; null: no caps."""
    gpus: Words = ()
    """UUIDs or numbers (in the order of the PCI bus) of the GPUs that the power agent caps;
    default: CUDA_VISIBLE_DEVICES, and without that all of the node."""
    max_waiting: Annotated[int, LIVE] = Field(default=1024, ge=1)
    """Accepted and not yet started work; beyond it the machine refuses (OVERLOADED)."""
    reconnect_grace_s: Annotated[float, LIVE] = Field(default=2.0, ge=0)
    """After a control stream broke, its work is cancelled when so much time has passed."""
    drain_s: Annotated[float, LIVE] = Field(default=120.0, ge=0)
    """After SIGTERM, how long running work and open leases may take."""

    @model_validator(mode="after")
    def _reachable(self) -> MachineSettings:
        if self.advertise is not None and self.advertise.is_any:
            raise ValueError(f"advertise: routers cannot connect to {self.advertise}; name this host")
        if self.advertise is None and self.listen.is_any:
            raise ValueError(f"advertise: needed because listen ({self.listen}) names no host")
        return self


class UcxSettings(Section):
    """Which UCX is loaded and what it may use."""

    library: Path | None = None
    """Path of libucp.so.0; default: the libucx-cu12 wheel, then the system's."""
    tls: str | None = None
    """UCX_TLS, such as "rc,cuda_copy,tcp"; default: the daemon's choice for this node."""
    net_devices: str | None = None
    """UCX_NET_DEVICES, such as "mlx5_0:1"; default: all."""


class KvdSettings(Section):
    """The KV daemon of one node."""

    node: Name = "node"
    """The node's name."""
    socket: Path = Path("/run/splitwise/kvd.sock")
    """Where engines of this node attach (Unix socket)."""
    listen: Address = Address("127.0.0.1", 7500)
    """Where other daemons, machine services and operators reach it (gRPC)."""
    advertise: Address | None = None
    """The address that other nodes use; default: the one it listens on."""
    ucx: UcxSettings = UcxSettings()
    """Which UCX is loaded and what it may use."""
    checksum: bool = True
    """Carry and verify a checksum of all blocks with each transfer."""
    same_node_copy: bool = True
    """Copy directly when source and destination attach to this daemon."""
    max_transfers: Annotated[int, LIVE] = Field(default=4096, ge=1)
    """Open transfers; beyond it reservations are refused."""
    drain_s: Annotated[float, LIVE] = Field(default=60.0, ge=0)
    """After SIGTERM, how long open transfers may take."""

    @model_validator(mode="after")
    def _reachable(self) -> KvdSettings:
        if self.advertise is not None and self.advertise.is_any:
            raise ValueError(f"advertise: other nodes cannot connect to {self.advertise}; name this host")
        if self.advertise is None and self.listen.is_any:
            raise ValueError(f"advertise: needed because listen ({self.listen}) names no host")
        return self


class PowerSettings(Section):
    """The power agent of one node (see docs/power.md).

    A cap is none, a share of the GPU's default limit such as 50%, or watts such as 350W.
    """

    node: Name = "node"
    """The node's name."""
    listen: Address = Address("127.0.0.1", 7600)
    """Where machines of this node and operators reach it (gRPC)."""
    state: Path = Path("/run/splitwise-power/limits.json")
    """File that keeps the previous limits until they are given back."""
    prompt_cap: Annotated[PowerCap, LIVE] = Cap()
    """Cap of machines in the prompt pool; the prompt phase slows down under one."""
    token_cap: Annotated[PowerCap, LIVE] = Cap(fraction=0.5)
    """Cap of machines in the token pool (50% does not slow them down: HHcap, Splitwise paper).
    It is lifted while they are borrowed for prompts."""
    mixed_cap: Annotated[PowerCap, LIVE] = Cap()
    """Cap of machines of the prompt pool while they are borrowed for tokens."""
    recap_after_s: Annotated[float, LIVE] = Field(default=2.0, ge=0)
    """How long a borrowed machine must be back in the token pool before it is capped again."""
    period_s: float = Field(default=1.0, ge=0.05, le=60)
    """How often limits and draw are read."""
    report_only: bool = False
    """Read and report, and never set a limit."""
    nvml: str = "pynvml"
    """The Python module that speaks to the driver; services.power.emulated_nvml emulates GPUs."""


class TlsSettings(Section):
    """TLS between processes: all of `ca`, `certificate` and `key`, or none (plain TCP).

    A service's certificate carries the DNS name ``ROLE.splitwise`` (router, machine, kvd,
    power, operator, client); both ends check the other's role, wherever it runs.
    """

    ca: Path | None = None
    """Certificates that sign the cluster's certificates (PEM)."""
    certificate: Path | None = None
    """This process's certificate, with its chain (PEM)."""
    key: Path | None = None
    """Its private key (PEM), readable by its user only."""

    @model_validator(mode="after")
    def _whole(self) -> TlsSettings:
        given = {name for name in ("ca", "certificate", "key") if getattr(self, name) is not None}
        if 0 < len(given) < 3:
            missing = sorted({"ca", "certificate", "key"} - given)
            raise ValueError(f"{', '.join(missing)}: needed when {', '.join(sorted(given))} is set")
        return self

    @property
    def on(self) -> bool:
        """True when connections are encrypted."""
        return self.ca is not None


class TelemetrySettings(Section):
    """Logs, metrics and traces. None of them holds prompts, outputs or secrets."""

    log_format: LogFormat = LogFormat.AUTO
    """json, readable, or auto: readable on a terminal, else json."""
    log_level: Annotated[str, StringConstraints(pattern="^(debug|info|warning|error)$"), LIVE] = "info"
    """The least severe lines to write."""
    metrics_listen: Address | None = None
    """Where Prometheus metrics are served over HTTP; null: nowhere."""
    traces_endpoint: Annotated[str, StringConstraints(pattern=r"^https?://[^/\s]+$")] | None = None
    """Collector that takes traces as OTLP over gRPC, such as http://127.0.0.1:4317; null: none are made."""
    traces_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of requests that are traced; a client that sends a traceparent has decided already."""


class Settings(Section):
    """Everything that can be set."""

    router: RouterSettings = RouterSettings()
    machine: MachineSettings = MachineSettings()
    kvd: KvdSettings = KvdSettings()
    power: PowerSettings = PowerSettings()
    tls: TlsSettings = TlsSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
