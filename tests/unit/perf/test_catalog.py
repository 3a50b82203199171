"""The shipped catalogue, users' additions to it, and models' own checks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from splitwise.perf.catalog import load_catalog, load_fit, save_fit, shipped
from splitwise.perf.model import Curve, PerformanceModel, PerformanceModelError, stack

if TYPE_CHECKING:
    from pathlib import Path


def test_every_llm_has_times_on_both_machines() -> None:
    catalog = shipped()
    for machine in ("a100-80gb", "h100-80gb", "h100-80gb-pcap"):
        for model, sizes in (("llama2-70b", (2, 4, 8)), ("bloom-176b", (8,))):
            for size in sizes:
                found = catalog.performance(model, machine, size)
                assert found.name == f"{model}|{machine}|tp{size}"
                assert 0.0 < found.token_seconds(1, 500) < found.prompt_seconds(2048) < 5.0
                assert "MIT" in found.source


def test_kv_sizes_are_those_of_the_real_models() -> None:
    catalog = shipped()
    assert catalog.language_model("llama2-70b").kv_bytes_per_token == 327_680  # grouped-query attention
    assert catalog.language_model("bloom-176b").kv_bytes_per_token == 4_014_080
    h100 = catalog.machine("h100-80gb")
    assert (
        catalog.language_model("bloom-176b").kv_capacity_tokens(h100)
        == (687_194_767_360 - 329 * 10**9) // 4_014_080
    )
    with pytest.raises(PerformanceModelError, match="does not fit 2 GPUs"):
        catalog.language_model("bloom-176b").kv_capacity_tokens(h100, 2)


def test_iso_power_and_iso_cost_counts_of_the_paper() -> None:
    """BA70 and BH40 draw the same power, BA86 and BH40 cost the same."""
    a100, h100 = shipped().machine("a100-80gb"), shipped().machine("h100-80gb")
    assert int(h100.power_units * 40 / a100.power_units) == 70
    assert int(h100.cost_per_hour * 40 / a100.cost_per_hour) == 86


def test_a_capped_machine_is_slower_in_the_prompt_phase_alone() -> None:
    whole = shipped().performance("llama2-70b", "h100-80gb")
    capped = shipped().performance("llama2-70b", "h100-80gb-pcap")
    assert capped.prompt_seconds(1500, 3) == pytest.approx(1.3 * whole.prompt_seconds(1500, 3))
    assert capped.token_seconds(32, 40_000) == whole.token_seconds(32, 40_000)


def test_users_machines_and_fits(tmp_path: Path) -> None:
    own = replace(shipped().performance("llama2-70b", "a100-80gb"), model="mine", hardware="lab", _row=[])
    save_fit(tmp_path / "mine.json", own)
    file = tmp_path / "own.yaml"
    file.write_text(
        """
hardware:
  cheap: {base: a100-80gb, cost_per_hour: 9.5}
  cheap-slow: {base: cheap, prompt_factor: 2.0, token_factor: 1.5}
  lab: {base: h100-80gb}
models:
  mine: {layers: 2, kv_heads: 3, head_dim: 4, dtype_bytes: 2, weight_bytes: 1.0e9}
fits: [mine.json]
"""
    )
    catalog = load_catalog(file)
    assert catalog.machine("cheap").cost_per_hour == 9.5
    assert catalog.machine("cheap").machine_watts == 6500
    base = shipped().performance("llama2-70b", "a100-80gb")
    slow = catalog.performance("llama2-70b", "cheap-slow")
    assert slow.hardware == "cheap-slow"
    assert slow.prompt_seconds(700) == pytest.approx(2 * base.prompt_seconds(700))
    assert slow.token_seconds(5, 9000) == pytest.approx(1.5 * base.token_seconds(5, 9000))
    assert catalog.performance("mine", "lab") == own
    assert catalog.language_model("mine").kv_bytes_per_token == 2 * 3 * 4 * 2 * 2
    assert "cheap" not in shipped().hardware


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hardware: {x: {base: gone}}", "no base hardware of x 'gone' in the catalogue; known: a100-80gb"),
        ("hardware: {x: {base: a100-80gb, gpus: 0}}", "own.yaml: x: gpus: "),
        ("hardware: {x: {base: a100-80gb, wings: 2}}", "own.yaml: x: unknown key .wings.; known: name, gpus"),
        ("hardware: {x: {gpus: 8}}", "own.yaml: x: gpu_memory_bytes: Field required"),
        ("hardware: {x: {base: a100-80gb, gpu_watts: .nan}}", "own.yaml: x: gpu_watts: "),
        ("hardware: [1]", "must map names"),
        ("machines: {}", "unknown key .machines.; known: hardware"),
        ("hardwares: {}", "did you mean .hardware."),
        ("hardware: {x: {base: h100-80g}}", "did you mean .h100-80gb."),
        ("fits: [gone.json]", "gone.json: cannot be read"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_bad_catalogue_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(PerformanceModelError, match=message):
        load_catalog(file)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(PerformanceModelError, match=r"'v100' in the catalogue; known: a100-80gb"):
        shipped().machine("v100")
    with pytest.raises(PerformanceModelError, match=r"no performance model 'bloom-176b\|a100-80gb\|tp2'"):
        shipped().performance("bloom-176b", "a100-80gb", 2)


def test_fits_survive_a_round_trip(tmp_path: Path) -> None:
    for model in shipped().fits.values():
        save_fit(tmp_path / "fit.json", model)
        assert load_fit(tmp_path / "fit.json") == model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context_seconds": float("nan")}, "context_seconds is nan"),
        ({"context_seconds": -1e-9}, "must be >= 0"),
        ({"token": {"x": [1, 1], "y": [1, 2]}}, "must grow"),
        ({"token": {"x": [1, 2], "y": [1]}}, "must pair up"),
        ({"token": {"x": [1, 2], "y": [1, 0]}}, "positive y"),
        ({"token": {"x": [], "y": []}}, "needs 1 to 16"),
        ({"token": 3}, "wrong kind"),
        ({"many_unit": 0}, "must be >= 1"),
    ],
)
def test_bad_models_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    data = shipped().performance("llama2-70b", "h100-80gb").to_dict() | change
    file = tmp_path / "fit.json"
    file.write_text(json.dumps(data))
    with pytest.raises(PerformanceModelError, match=message):
        load_fit(file)
    del data["token"]
    file.write_text(json.dumps(data))
    with pytest.raises(PerformanceModelError, match="lacks 'token'"):
        load_fit(file)


def test_compat_needs_its_table() -> None:
    curve = Curve((1.0,), (0.1,))
    model = PerformanceModel("m", "h", 1, curve, curve, curve, 0.0)
    with pytest.raises(PerformanceModelError, match="no compat table"):
        model.iteration_seconds(1, 1, 0, 0, compat=True)
    assert model.iteration_seconds(1, 1, 0, 0) == 0.1


def test_compat_reads_the_prompt_table_at_the_number_of_sequences() -> None:
    model = shipped().performance("bloom-176b", "h100-80gb")
    assert model.compat is not None
    table = model.compat.token
    slope = (table.y[1] - table.y[0]) / (table.x[1] - table.x[0])
    expected = table.y[0] + slope * (32 - table.x[0])  # extrapolated below 128 "prompt tokens"
    assert model.iteration_seconds(0, 0, 32, 10**6, compat=True) == pytest.approx(expected, rel=1e-12)
    assert model.iteration_seconds(512, 1, 0, 0, compat=True) == model.compat.prompt.y[2]
    mixed = model.iteration_seconds(500, 1, 12, 0, compat=True)
    assert mixed == pytest.approx(1.1 * model.compat.prompt.y[2], rel=1e-12)


def test_rows_stack() -> None:
    models = list(shipped().fits.values())
    rows = stack(models)
    assert rows.shape == (len(models), len(models[0].row()))
    with pytest.raises(PerformanceModelError, match="no performance model given"):
        stack([])
