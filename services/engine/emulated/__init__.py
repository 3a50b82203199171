"""The emulated engine: no model, real KV bytes, real transfers, time from the performance model."""

from services.engine.emulated.engine import EmulatedEngine
from services.engine.emulated.settings import EmulatedSettings, settings_from_options

__all__ = ["EmulatedEngine", "EmulatedSettings", "settings_from_options"]
