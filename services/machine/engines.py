"""Choosing the engine: the one place that names their classes, imported only when chosen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from splitwise.config import EngineKind

if TYPE_CHECKING:
    from services.engine.interface import Engine
    from splitwise.config import MachineSettings


def create_engine(settings: MachineSettings) -> Engine:
    """Return the engine that the settings name, not yet started; raises `ConfigError`."""
    if settings.engine.kind is EngineKind.EMULATED:
        # A few kernels per iteration are not worth loading the compiler in each of many machines.
        os.environ.setdefault("NUMBA_DISABLE_JIT", "1")
        from services.engine.emulated import EmulatedEngine, settings_from_options

        options = settings_from_options(settings.engine.options)
        return EmulatedEngine(options, settings.id, settings.kvd_socket)
    from services.engine.vllm import VllmEngine
    from services.engine.vllm import settings_from_options as vllm_settings

    chosen = vllm_settings(settings.model, settings.model_name, settings.engine.options)
    return VllmEngine(chosen, settings.id, settings.kvd_socket)
