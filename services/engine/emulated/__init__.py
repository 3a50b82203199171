"""The emulated engine: no model, real KV bytes, real transfers, time from the performance model."""

from services.engine.emulated.engine import EmulatedEngine
from services.engine.emulated.expected import expected_tokens
from services.engine.emulated.settings import EmulatedSettings, settings_from_options

__all__ = ["EmulatedEngine", "EmulatedSettings", "expected_tokens", "settings_from_options"]
