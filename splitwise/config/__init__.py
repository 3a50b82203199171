"""Settings of every process: one schema, read from flags, environment, a YAML file, defaults."""

from splitwise.config.address import Address
from splitwise.config.load import Loaded, load_settings
from splitwise.config.schema import (
    EngineKind,
    EngineSettings,
    KvdSettings,
    LogFormat,
    MachineSettings,
    PowerSettings,
    RouterSettings,
    Settings,
    SloSettings,
    TelemetrySettings,
    TlsSettings,
)

__all__ = [
    "Address",
    "EngineKind",
    "EngineSettings",
    "KvdSettings",
    "Loaded",
    "LogFormat",
    "MachineSettings",
    "PowerSettings",
    "RouterSettings",
    "Settings",
    "SloSettings",
    "TelemetrySettings",
    "TlsSettings",
    "load_settings",
]
