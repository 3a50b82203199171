"""Words of ``--emulate``, and the file that the fleet reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from services.engine.emulated import settings_from_options
from splitwise.config import Address, load_settings
from splitwise.errors import ConfigError
from splitwise.launch.emulate import EmulatedGroup, fleet_gpus, parse_groups, write_fleet

if TYPE_CHECKING:
    from pathlib import Path


def test_words() -> None:
    assert parse_groups(["25xH100:prompt", "15xa100-80gb:token", "H100cap:token"]) == [
        EmulatedGroup(25, "h100-80gb", "prompt"),
        EmulatedGroup(15, "a100-80gb", "token"),
        EmulatedGroup(1, "h100-80gb-pcap", "token"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "0 machines"),
        (["25xH100"], "'25xH100': write COUNTxHARDWARE"),
        (["25xH100:mixed"], "'25xH100:mixed': write"),
        (["0xH100:prompt", "1xH100:token"], "'0xH100:prompt': write"),
        (["999xH100:prompt", "2xH100:token"], "1001 machines"),
        (["2xV100:prompt"], "no hardware 'V100'; known: a100-80gb"),
        (["-1xH100:prompt"], "write COUNTx"),
    ],
)
def test_wrong_words_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_groups(words)


def test_every_entry_is_what_a_machine_reads(tmp_path: Path) -> None:
    file = tmp_path / "machines.json"
    groups = parse_groups(["2xH100:prompt", "A100:token", "H100:prompt"])
    names = write_fleet(
        file,
        groups,
        routers=[Address("127.0.0.1", 7400), "[::1]:7400"],
        kvd_socket=tmp_path / "k.sock",
        kvd_address="127.0.0.1:7500",
        options={"time_scale": 0.1},
    )
    assert names == ["prompt-0", "prompt-1", "token-0", "prompt-2"]
    entries = json.loads(file.read_text())
    assert [entry["home"] for entry in entries] == ["prompt", "prompt", "token", "prompt"]
    machine = load_settings("machine", entries[2]["arguments"]).settings.machine
    assert machine.id == "token-0"
    assert list(map(str, machine.routers)) == ["127.0.0.1:7400", "[::1]:7400"]
    assert machine.kvd_socket == tmp_path / "k.sock"
    assert str(machine.kvd_address) == "127.0.0.1:7500"
    engine = settings_from_options(machine.engine.options)
    assert (engine.hardware, engine.time_scale) == ("a100-80gb", 0.1)


def test_machines_get_their_gpus_and_their_agent(tmp_path: Path) -> None:
    groups = parse_groups(["H100:prompt", "A100:token"])
    gpus = fleet_gpus(groups)
    assert {name: (len(own), own[0].highest) for name, own in gpus.items()} == {
        "prompt-0": (8, 700),
        "token-0": (8, 400),
    }
    write_fleet(
        tmp_path / "machines.json",
        groups,
        routers=["127.0.0.1:7400"],
        kvd_socket=tmp_path / "k.sock",
        kvd_address="127.0.0.1:7500",
        power_agent="127.0.0.1:7600",
        gpu_file=tmp_path / "gpus.bin",
    )
    for entry in json.loads((tmp_path / "machines.json").read_text()):
        machine = load_settings("machine", entry["arguments"]).settings.machine
        assert machine.power_agent == Address("127.0.0.1", 7600)
        engine = settings_from_options(machine.engine.options)
        assert machine.gpus == engine.gpus == tuple(gpu.uuid for gpu in gpus[machine.id])
        assert engine.gpu_file == tmp_path / "gpus.bin"


def test_a_type_that_is_capped_already_is_not_capped_twice() -> None:
    with pytest.raises(ConfigError, match="would count twice with a power agent: name h100-80gb"):
        fleet_gpus(parse_groups(["H100:prompt", "H100cap:token"]))
