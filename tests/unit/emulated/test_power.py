"""What emulated GPUs draw, and how their limits act on the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from services.engine.emulated import settings_from_options
from services.engine.emulated.power import EmulatedPower
from splitwise.errors import ConfigError
from splitwise.launch.emulated_gpus import gpu_models
from splitwise.perf.catalog import shipped
from splitwise.perf.power import IDLE_SHARE, prompt_slowdown
from tests.support.emulated_gpus import UUIDS, GpuNode

if TYPE_CHECKING:
    from pathlib import Path


def power(node: GpuNode, *gpus: str, **options: Any) -> EmulatedPower:
    return EmulatedPower(settings_from_options({"gpu_file": str(node.file), "gpus": list(gpus), **options}))


def demands(node: GpuNode) -> list[float]:
    return [float(value) / 1e3 for value in node.gpus.records["demand"]]


def test_batches_draw_and_idling_draws_little(tmp_path: Path) -> None:
    node = GpuNode(tmp_path)
    engine = power(node, UUIDS[1])
    assert demands(node) == [0, IDLE_SHARE * 700]
    engine.begin(prompt_tokens=0, sequences=4)
    token = demands(node)[1]
    engine.begin(prompt_tokens=2048, sequences=4)
    prompt = demands(node)[1]
    assert IDLE_SHARE * 700 < token < prompt <= 700
    assert prompt == pytest.approx(700 * shipped().power("llama2-70b").share(prompt_tokens=2048), abs=0.01)
    engine.idle()
    assert demands(node) == [0, IDLE_SHARE * 700]


def test_a_cap_slows_prompts_down_and_tokens_not(tmp_path: Path) -> None:
    node = GpuNode(tmp_path)
    engine = power(node, *UUIDS[:2])
    assert engine.begin(2048, 0) == 1
    node.set_limit(1, 350)  # the slowest GPU of a tensor-parallel machine is waited for
    assert engine.begin(2048, 8) == pytest.approx(1.3)
    assert engine.begin(0, 8) == 1
    node.set_other_limit(1, 525)
    node.set_limit(1, 700)
    assert engine.begin(2048, 0) == pytest.approx(1.15)


def test_the_slowdown_is_the_catalogue_s_at_half_power() -> None:
    capped = shipped().machine("h100-80gb-pcap")
    assert prompt_slowdown(capped.gpu_power_cap) == pytest.approx(capped.prompt_factor)
    assert capped.token_factor == 1
    assert prompt_slowdown(1.0) == prompt_slowdown(1.2) == 1.0
    assert prompt_slowdown(0.3) > prompt_slowdown(0.5)


def test_without_gpus_nothing_changes() -> None:
    engine = EmulatedPower(settings_from_options({}))
    engine.idle()
    assert engine.begin(2048, 8) == 1


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    node = GpuNode(tmp_path)
    with pytest.raises(ConfigError, match="no emulated GPU 'GPU-x'"):
        power(node, "GPU-x")
    with pytest.raises(ConfigError, match="is no file of emulated GPUs"):
        EmulatedPower(settings_from_options({"gpu_file": str(tmp_path / "none"), "gpus": ["GPU-x"]}))
    with pytest.raises(ConfigError, match="gpu_file and gpus belong together"):
        power(node)
    with pytest.raises(ConfigError, match="no power model"):
        power(node, UUIDS[0], tensor_parallel=3)


def test_gpus_of_a_type_have_its_power_and_lasting_names() -> None:
    a100 = gpu_models("token-0", shipped().machine("a100-80gb"))
    assert len({gpu.uuid for gpu in a100}) == 8
    assert {gpu.highest for gpu in a100} == {400}
    assert gpu_models("token-0", shipped().machine("a100-80gb")) == a100
    assert not {gpu.uuid for gpu in gpu_models("token-1", shipped().machine("a100-80gb"))} & {
        g.uuid for g in a100
    }
    assert {gpu.floor for gpu in gpu_models("x", shipped().machine("h100-80gb"), 2)} == {200}
