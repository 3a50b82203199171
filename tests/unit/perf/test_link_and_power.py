"""The link and the power model, by hand-made numbers and by the paper's."""

from __future__ import annotations

import pytest

from splitwise.perf.catalog import shipped
from splitwise.perf.link import LinkModel
from splitwise.perf.model import PerformanceModelError
from splitwise.perf.power import IDLE_SHARE, energy_joules, machine_watts

LINK = LinkModel(bytes_per_second=1e9, latency=0.001)


def test_serialized_is_seen_whole() -> None:
    assert LINK.exposed_seconds(5e8, 10.0, layers=10, layerwise=False) == pytest.approx(0.501)


def test_layerwise_leaves_the_last_layer_when_the_link_is_fast() -> None:
    assert LINK.exposed_seconds(5e8, 10.0, layers=10, layerwise=True) == pytest.approx(0.001 + 0.05)


def test_layerwise_leaves_the_rest_when_the_link_is_slow() -> None:
    """1 s of sending behind 0.4 s of computing in 4 layers: sending starts at 0.1 s and ends at 1.1 s."""
    assert LINK.exposed_seconds(1e9, 0.4, layers=4, layerwise=True) == pytest.approx(0.001 + 1.1 - 0.4)


def test_sharing_divides_the_bandwidth() -> None:
    assert LINK.transfer_seconds(1e9, sharing=4) == pytest.approx(4.001)
    assert LINK.transfer_seconds(1e9, sharing=0.2) == pytest.approx(1.001)


def test_hiding_never_costs_more_than_not_hiding_but_for_the_first_layer() -> None:
    for size in (1e6, 1e8, 1e9, 1e10):
        hidden = LINK.exposed_seconds(size, 0.4, layers=80, layerwise=True)
        assert hidden <= LINK.exposed_seconds(size, 0.4, layers=80, layerwise=False) + 1e-9


def test_the_papers_visible_times() -> None:
    """About 8 ms on A100 and 5 ms on H100 stay visible layer-wise (section IV-C)."""
    llm = shipped().language_model("llama2-70b")
    for name, seconds in (("a100-80gb", 0.008), ("h100-80gb", 0.005)):
        machine = shipped().machine(name)
        prompt = shipped().performance("llama2-70b", name).prompt_seconds(1500)
        seen = machine.link.exposed_seconds(
            1500 * llm.kv_bytes_per_token, prompt, layers=llm.layers, layerwise=True
        )
        assert seen == pytest.approx(seconds, rel=0.1)


def test_bad_links_are_refused() -> None:
    with pytest.raises(PerformanceModelError, match="above 0"):
        LinkModel(0.0)
    with pytest.raises(PerformanceModelError, match="not below"):
        LinkModel(1.0, latency=-1.0)


def test_power_by_phase_and_cap() -> None:
    catalog = shipped()
    power = catalog.power("llama2-70b")
    h100, capped = catalog.machine("h100-80gb"), catalog.machine("h100-80gb-pcap")
    idle = machine_watts(h100, power)
    token = machine_watts(h100, power, sequences=8)
    prompt = machine_watts(h100, power, prompt_tokens=4096)
    assert idle == pytest.approx(10_200 - 8 * 700 * (1 - IDLE_SHARE))
    assert idle < token < prompt <= 10_200
    assert machine_watts(h100, power, prompt_tokens=4096, sequences=8) == prompt
    assert machine_watts(capped, power, prompt_tokens=4096) == pytest.approx(7140)
    assert machine_watts(h100, power, sequences=8, gpus=2) == pytest.approx(token / 4)
    assert energy_joules(h100, power, 2.0, sequences=8) == pytest.approx(2 * token)


def test_power_between_and_beyond_what_was_measured() -> None:
    power = shipped().power("bloom-176b")
    assert power.share(prompt_tokens=1) == power.prompt_share[0]
    assert power.share(prompt_tokens=10**6) == power.prompt_share[-1] == 1.0
    assert power.share(sequences=100) == power.token_share[-1]
    assert power.measured_on == "a100-80gb"
