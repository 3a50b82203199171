"""Layers of settings, and what is said about wrong ones."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwise.config import Address, EngineKind, Settings, load_settings
from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def refusal(section=None, arguments=(), environment=None, file=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(section, arguments, environment=environment or {}, file=file)
    return str(caught.value)


def test_flags_over_environment_over_file_over_defaults(tmp_path: Path):
    file = tmp_path / "s.yaml"
    file.write_text("kvd: {node: from-file, max_transfers: 1, drain_s: 1}\n")
    environment = {
        "SPLITWISE_KVD__NODE": "from-env",
        "SPLITWISE_KVD__MAX_TRANSFERS": "2",
        "SPLITWISE_CONFIG": str(file),
    }
    loaded = load_settings("kvd", ["--node", "from-flag"], environment=environment)
    kvd = loaded.settings.kvd
    assert (kvd.node, kvd.max_transfers, kvd.drain_s, kvd.checksum) == ("from-flag", 2, 1.0, True)
    assert loaded.origins["kvd", "node"] == "flag --node"
    assert loaded.origins["kvd", "max_transfers"] == "environment SPLITWISE_KVD__MAX_TRANSFERS"
    assert loaded.origins["kvd", "drain_s"] == str(file)
    assert ("kvd", "checksum") not in loaded.origins


def test_every_way_to_write_a_flag():
    words = ["--id=7", "--listen", "[::1]:9000", "--routers", "127.0.0.1:1, [::2]:2", "--max-waiting", "3",
             "--engine.kind=emulated", "--engine.options.kv_blocks", "64", "--telemetry.log-level", "debug",
             "--kvd.ucx.tls", "tcp,self"]  # fmt: skip
    settings = load_settings("machine", words, environment={}).settings
    machine = settings.machine
    assert (machine.id, machine.listen, machine.max_waiting) == ("7", Address("::1", 9000), 3)
    assert machine.routers == (Address("127.0.0.1", 1), Address("::2", 2))
    assert machine.engine.kind is EngineKind.EMULATED
    assert machine.engine.options == {"kv_blocks": 64}
    assert settings.telemetry.log_level == "debug"
    assert settings.kvd.ucx.tls == "tcp,self"


def test_maps_and_lists_are_yaml():
    words = ["--models", "{a.b-c: /x}", "--machines", '["[::1]:1"]', "--http_listen", "null"]
    router = load_settings("router", words, environment={}).settings.router
    assert {name: str(path) for name, path in router.models.items()} == {"a.b-c": "/x"}
    assert router.machines == (Address("::1", 1),)
    assert router.http_listen is None


def test_keys_below_a_map_are_merged():
    words = ["--engine.options", "{a: 1, b: 2}", "--engine.options.b", "3", "--engine.options.some-key", "x"]
    options = load_settings("machine", words, environment={}).settings.machine.engine.options
    assert options == {"a": 1, "b": 3, "some-key": "x"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lisen", "x"], "flag --lisen: unknown key 'lisen' in machine; did you mean 'listen'?"),
        (["--engine.kin", "x"], "unknown key 'kin' in machine.engine; did you mean 'kind'?"),
        (["--kvd.soket", "x"], "unknown key 'soket' in kvd; did you mean 'socket'?"),
        (["--zzzzz", "x"], "known: id, home_pool"),
        (["--engine", "x"], "machine.engine is a section, not a value"),
        (["--listen", "x"], "flag --listen: machine.listen: 'x' is not an address"),
        (["--listen"], "flag --listen: needs a value"),
        (["listen"], "flags are written --key value"),
        (["--listen", "0.0.0.0:1"], "flag --listen: machine: advertise: needed"),
        (["--advertise", "[::]:1"], "routers cannot connect to [::]:1"),
        (["--max_waiting", "0"], "flag --max_waiting: machine.max_waiting: "),
        (["--id", "a b"], "machine.id"),
        (["--telemetry.log_level", "loud"], "telemetry.log_level"),
        (["--router.machine_lease_ms", "1500"], "at least twice heartbeat_ms"),
        (["--tls.ca", "x"], "certificate, key: needed when ca is set"),
    ],
)
def test_refusals_name_origin_key_and_remedy(arguments, said):
    assert said in refusal("machine", arguments)


def test_the_environment_is_checked_too():
    said = refusal(environment={"SPLITWISE_ROUTER__POLICI": "x"})
    assert (
        said == "environment SPLITWISE_ROUTER__POLICI: unknown key 'polici' in router; did you mean 'policy'?"
    )
    assert load_settings(environment={"SPLITWISE_ROUTER": "x", "SPLITWISE_CACHE_DIR": "y"}).origins == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("routr: {}", "unknown key 'routr'; did you mean 'router'?"),
        ("[1]", "must be a map of sections"),
        ("router: 5", "router is a section"),
        ("router: {listen: [::1]:9000}", "quote IPv6 addresses"),
        ("a: b: c", "not valid YAML"),
        ("router: {queue_limit: many}", "router.queue_limit"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, said: str):
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    message = refusal(file=file)
    assert message.startswith(f"{file}: ")
    assert said in message


def test_a_missing_file_is_named(tmp_path: Path):
    assert "no such file" in refusal(file=tmp_path / "none.yaml")


def test_empty_files_and_sections_are_defaults(tmp_path: Path):
    file = tmp_path / "s.yaml"
    for content in ("", "router:\nkvd: {}\n"):
        file.write_text(content)
        assert load_settings(environment={}, file=file).settings == Settings()


def test_all_services_listen_on_loopback_by_default():
    settings = Settings()
    assert all(s.listen.is_loopback for s in (settings.router, settings.machine, settings.kvd))
    assert settings.telemetry.metrics_listen is None


@given(st.dictionaries(st.text(min_size=1, max_size=12), st.text(max_size=12), max_size=3))
def test_nonsense_is_refused_as_a_configuration_error_or_taken(words: dict[str, str]):
    arguments = [part for key, value in words.items() for part in (f"--{key}", value)]
    with contextlib.suppress(ConfigError):  # nothing else may come out
        load_settings("machine", arguments, environment={})
