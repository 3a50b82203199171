"""Options of the emulated engine: what is wrong is named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.engine.emulated import EmulatedEngine, EmulatedSettings, settings_from_options
from services.machine.engines import create_engine
from splitwise.config import EngineKind, EngineSettings, MachineSettings
from splitwise.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wings": 2}, r"machine\.engine\.options\.wings: Extra inputs"),
        ({"time_scale": -1}, r"machine\.engine\.options\.time_scale: "),
        ({"layers": "many"}, r"machine\.engine\.options\.layers: "),
        ({"token_bytes_per_layer": 12}, "must be a multiple of 8"),
        ({"max_running": 64, "max_batch_tokens": 64}, "no room for a prompt"),
        ({"kv_blocks": 0, "vocab_size": 5}, r"kv_blocks: .*; machine\.engine\.options\.vocab_size: "),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_from_options(options)


def test_unknown_hardware_is_named() -> None:
    settings = EmulatedSettings(hardware="v100")
    with pytest.raises(ConfigError, match=r"machine\.engine\.options: .*'v100'.*known: a100-80gb"):
        EmulatedEngine(settings, "m", "/nowhere.sock")


def test_a_machine_creates_the_engine_that_its_options_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")  # what create_engine would set for good
    settings = MachineSettings(
        id="m1",
        kvd_socket=Path("/nowhere.sock"),
        engine=EngineSettings(kind=EngineKind.EMULATED, options={"kv_blocks": 77}),
    )
    engine = create_engine(settings)
    assert isinstance(engine, EmulatedEngine)
    assert engine.load().kv_blocks_total == 77
    assert engine.failure() == "not started"


def test_memory_of_the_defaults_is_a_few_megabytes() -> None:
    settings = EmulatedSettings()
    size = settings.kv_blocks * settings.block_tokens * settings.layers * settings.token_bytes_per_layer
    assert size == 4 << 20
