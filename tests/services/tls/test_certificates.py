"""The certificates as made by the script, and what a server or client says of bad files."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from splitwise.config import Address, TlsSettings
from splitwise.errors import AuthenticationError, ConfigError, ExitCode, ListenError, UnavailableError
from splitwise.rpc.channels import RpcServer, open_channel, open_sync_channel
from splitwise.rpc.identity import Role, server_name
from splitwise.rpc.status import to_exception
from splitwise.rpc.v1 import machine_pb2, router_pb2
from splitwise.rpc.v1.machine_pb2_grpc import (
    PromptServiceServicer,
    PromptServiceStub,
    add_PromptServiceServicer_to_server,
)
from splitwise.rpc.v1.router_pb2_grpc import RouterServicer, RouterStub, add_RouterServicer_to_server
from tests.services.tls.cluster import flags, make_certificates, tls_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ANYWHERE = Address("127.0.0.1", 0)
CALL_S = 30.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "new" / "folder"
    assert make_certificates(folder).returncode == 0
    return folder


def openssl(*arguments: str) -> str:
    return subprocess.run(["openssl", *arguments], check=True, capture_output=True, text=True).stdout


def sign(folder: Path, name: str, extensions: str, days: int = 1) -> TlsSettings:
    """Make a certificate that the script would not, by the same CA."""
    (folder / "odd.cnf").write_text(f"[x]\n{extensions}\n")
    key, request = folder / f"{name}.key", folder / f"{name}.csr"
    openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))  # fmt: skip
    openssl("x509", "-req", "-in", str(request), "-CA", str(folder / "ca.pem"), "-CAkey",
            str(folder / "ca.key"), "-set_serial", "7", "-days", str(days), "-extfile",
            str(folder / "odd.cnf"), "-extensions", "x", "-out", str(folder / f"{name}.pem"))  # fmt: skip
    return tls_of(folder, name)


class Models(RouterServicer):
    async def ListModels(self, request: Any, context: Any) -> router_pb2.ListModelsResponse:
        return router_pb2.ListModelsResponse()


async def list_models(server_tls: TlsSettings, caller_tls: TlsSettings, role: Role = Role.ROUTER) -> Any:
    """Serve once and call once; returns the answer or raises our exception."""
    server = RpcServer(ANYWHERE, ["splitwise.v1.Router"], tls=server_tls)
    add_RouterServicer_to_server(Models(), server.grpc)
    address = await server.start()
    try:
        async with open_channel(address, tls=caller_tls, role=role) as channel:
            return await RouterStub(channel).ListModels(router_pb2.ListModelsRequest(), timeout=CALL_S)
    except grpc.aio.AioRpcError as error:
        raise to_exception(error) from None
    finally:
        await server.stop(0)


@pytest.mark.parametrize("role", list(Role))
def test_a_certificate_for_each_role(made: Path, role: Role):
    text = openssl("x509", "-in", str(made / f"{role}.pem"), "-noout", "-text")
    assert f"DNS:{server_name(role)}\n" in text
    assert text.count("DNS:") == 1
    assert "CA:FALSE" in text
    assert ("TLS Web Server" in text) == (role not in {Role.CLIENT, Role.OPERATOR})
    openssl("verify", "-x509_strict", "-CAfile", str(made / "ca.pem"), str(made / f"{role}.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made / f"{role}.pem", made / f"{role}.key")


def test_keys_are_for_their_user_alone(made: Path):
    keys = list(made.glob("*.key"))
    assert {key.stem for key in keys} == {"ca", *Role}
    assert {key.stat().st_mode & 0o777 for key in keys} == {0o600}
    assert made.stat().st_mode & 0o777 == 0o700
    assert {file.suffix for file in made.iterdir()} == {".key", ".pem"}  # nothing is left behind


def test_a_second_run_keeps_what_is_there_and_adds(tmp_path: Path):
    assert make_certificates(tmp_path, "router").returncode == 0
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    again = make_certificates(tmp_path, "router", "kvd=node-7")
    assert again.returncode == 0
    assert f"{tmp_path}/router.pem: kept" in again.stdout
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert before.items() <= after.items()
    assert set(after) - set(before) == {"node-7.pem", "node-7.key"}
    text = openssl(
        "x509", "-in", str(tmp_path / "node-7.pem"), "-noout", "-subject", "-ext", "subjectAltName"
    )
    assert "CN = node-7" in text
    assert "DNS:kvd.splitwise" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["router", "boss"], "boss: no role 'boss'; known: router machine"),
        (["router", "machine=../x"], "machine=../x: a name has letters"),
        (["machine=ca"], "ca is the name of the CA's own files"),
        (["router+boss=x"], "no role 'boss'"),
        (["router+kvd"], "several roles need a name, as in router+kvd=host"),
        (["machine="], "machine=: a name has letters"),
        ([""], "no role ''"),
    ],
)
def test_a_bad_word_is_refused_before_anything_is_written(tmp_path: Path, words: list[str], says: str):
    run = make_certificates(tmp_path / "x", *words)
    assert run.returncode == 2
    assert says in run.stderr
    assert not (tmp_path / "x").exists()


def test_bad_days_and_a_missing_ca_key(tmp_path: Path):
    assert "DAYS=soon" in make_certificates(tmp_path, "router", days="soon").stderr
    assert make_certificates(tmp_path, "router").returncode == 0
    (tmp_path / "ca.key").unlink()
    run = make_certificates(tmp_path, "kvd")
    assert run.returncode == 1
    assert "ca.key: needed to sign" in run.stderr
    assert not (tmp_path / "kvd.pem").exists()


async def test_the_pair_that_works(made: Path):
    await list_models(tls_of(made, "router"), tls_of(made, "client"))


def test_the_same_from_threads(made: Path):
    """The synchronous channel presents its certificate and checks the role, too."""

    async def serve_and(call: Callable[[Address], None]) -> None:
        server = RpcServer(ANYWHERE, ["splitwise.v1.Router"], tls=tls_of(made, "router"))
        add_RouterServicer_to_server(Models(), server.grpc)
        address = await server.start()
        try:
            await asyncio.to_thread(call, address)
        finally:
            await server.stop(0)

    def call(address: Address) -> None:
        for role, works in ((Role.ROUTER, True), (Role.KVD, False)):
            with open_sync_channel(address, tls=tls_of(made, "client"), role=role) as channel:
                stub = RouterStub(channel)
                if works:
                    stub.ListModels(router_pb2.ListModelsRequest(), timeout=CALL_S)
                    continue
                with pytest.raises(grpc.RpcError, match="Hostname Verification"):
                    stub.ListModels(router_pb2.ListModelsRequest(), timeout=CALL_S)

    asyncio.run(serve_and(call))


@pytest.mark.parametrize(
    ("name", "extensions"),
    [
        ("none", "basicConstraints=CA:FALSE"),
        ("client.splitwise", "basicConstraints=CA:FALSE"),  # the common name says nothing
        ("uri", "subjectAltName=URI:client.splitwise"),
        ("mail", "subjectAltName=email:client.splitwise"),
        ("longer", "subjectAltName=DNS:client.splitwise.example.org"),
        ("star", "subjectAltName=DNS:*.splitwise"),
    ],
)
async def test_only_the_exact_dns_name_is_a_role(made: Path, name: str, extensions: str):
    with pytest.raises(AuthenticationError, match=r"names no role; needs client or operator"):
        await list_models(tls_of(made, "router"), sign(made, name, extensions))


async def test_one_certificate_may_have_several_roles(made: Path):
    run = make_certificates(made, "router+operator=both")
    assert run.returncode == 0, run.stderr
    both = tls_of(made, "both")
    await list_models(both, both)


async def test_expired_certificates_are_refused(made: Path):
    client = sign(made, "old-client", "subjectAltName=DNS:client.splitwise", days=-1)
    router = sign(made, "old-router", "subjectAltName=DNS:router.splitwise", days=-1)
    with pytest.raises(UnavailableError):
        await list_models(tls_of(made, "router"), client)
    with pytest.raises(UnavailableError, match=r"certificate has expired.*see docs/security\.md"):
        await list_models(router, tls_of(made, "client"))


async def test_a_clients_certificate_cannot_serve(made: Path):
    with pytest.raises(UnavailableError, match="unsupported certificate purpose"):
        await list_models(tls_of(made, "client"), tls_of(made, "machine"), Role.CLIENT)


def broken(made: Path, folder: Path) -> dict[str, tuple[TlsSettings, str]]:
    good = tls_of(made, "router")
    text, empty, locked = folder / "text.pem", folder / "empty.pem", folder / "locked.key"
    text.write_text("hello\n")
    empty.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    openssl("ec", "-in", str(good.key), "-aes128", "-passout", "pass:secret", "-out", str(locked))
    change, unread = good.model_copy, r"tls\.certificate, tls\.key: .*cannot be read"
    return {
        "absent": (change(update={"key": folder / "no.key"}), r"tls\.key: .*no\.key: No such file"),
        "text": (change(update={"ca": text}), r"tls\.ca: .*text\.pem is not a PEM file"),
        "garbled ca": (change(update={"ca": empty}), r"tls\.ca: .*holds no certificate"),
        "garbled pair": (
            change(update={"certificate": empty}),
            unread,
        ),
        "another's key": (change(update={"key": made / "kvd.key"}), r"kvd\.key: they do not belong together"),
        "swapped": (
            change(update={"key": good.certificate}),
            unread,
        ),
        "locked": (change(update={"key": locked}), r"the key needs a password"),
    }


@pytest.mark.parametrize(
    "case", ["absent", "text", "garbled ca", "garbled pair", "another's key", "swapped", "locked"]
)
async def test_bad_files_are_named_by_both_ends(made: Path, tmp_path: Path, case: str):
    tls, says = broken(made, tmp_path)[case]
    with pytest.raises(ConfigError, match=says):
        open_channel(ANYWHERE, tls=tls, role=Role.KVD)
    with pytest.raises(ConfigError, match=says):
        open_sync_channel(ANYWHERE, tls=tls, role=Role.KVD)
    with pytest.raises(ConfigError, match=says):
        await RpcServer(ANYWHERE, [], tls=tls).start()


async def test_a_port_in_use_is_not_taken_for_a_bad_certificate(made: Path):
    server = RpcServer(ANYWHERE, [], tls=tls_of(made, "router"))
    address = await server.start()
    try:
        with pytest.raises(ListenError, match=f"{address}: in use"):
            await RpcServer(address, [], tls=tls_of(made, "router")).start()
    finally:
        await server.stop(0)


async def test_a_key_that_others_can_read_is_warned_of(made: Path, tmp_path: Path, capsys: Any):
    key = tmp_path / "open.key"
    key.write_bytes((made / "router.key").read_bytes())
    key.chmod(0o644)
    server = RpcServer(ANYWHERE, [], tls=tls_of(made, "router").model_copy(update={"key": key}))
    await server.start()
    await server.stop(0)
    said = "".join(capsys.readouterr())
    assert "rpc.key_open" in said
    assert "PRIVATE" not in said


@pytest.mark.parametrize("service", ["router", "kvd", "prompt"])
def test_a_process_with_a_wrong_key_ends_for_good(made: Path, tmp_path: Path, service: str):
    """Exit code 78 and one line that names both files; no restart, and nothing of the key."""
    tls = tls_of(made, "machine").model_copy(update={"key": made / "kvd.key"})
    own = {"router": [], "kvd": ["--socket", str(tmp_path / "s")], "prompt": ["--engine.kind", "emulated"]}
    run = subprocess.run(
        [sys.executable, "-m", f"services.{service}", "--listen", "127.0.0.1:0", *own[service], *flags(tls)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == ExitCode.CONFIG
    assert "machine.pem" in run.stderr
    assert "they do not belong together" in run.stderr
    assert (made / "kvd.key").read_text().splitlines()[1] not in run.stdout + run.stderr


class Refusing(PromptServiceServicer):
    """Never called: the caller's role is looked at before."""


async def test_a_stream_is_refused_with_its_status_however_it_races(made: Path):
    """The refusal must not overtake the caller's first message: grpc would make it INTERNAL."""
    server = RpcServer(ANYWHERE, ["splitwise.v1.PromptService"], tls=tls_of(made, "machine"))
    add_PromptServiceServicer_to_server(Refusing(), server.grpc)
    address = await server.start()

    async def ask(number: int) -> str:
        first = machine_pb2.PromptCommand(hello=machine_pb2.Hello(router_id=str(number)))
        async with open_channel(address, tls=tls_of(made, "kvd"), role=Role.MACHINE) as channel:
            call: Any = PromptServiceStub(channel).Run
            stream = call(iter([first]), timeout=CALL_S) if number % 2 else call(timeout=CALL_S)
            try:
                if not number % 2:
                    await stream.write(first)
                await stream.read()
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name} {error.details()}"
            return f"{(await stream.code()).name} {await stream.details()}"

    try:
        for _ in range(25):
            answers = set(await asyncio.gather(*map(ask, range(8))))
            method = "/splitwise.v1.PromptService/Run"
            assert answers == {f"PERMISSION_DENIED {method}: the certificate is for kvd; needs router"}
    finally:
        await server.stop(0)


async def test_a_caller_that_sends_nothing_is_refused_all_the_same(
    made: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("splitwise.rpc.identity.FIRST_MESSAGE_S", 0.1)
    server = RpcServer(ANYWHERE, ["splitwise.v1.PromptService"], tls=tls_of(made, "machine"))
    add_PromptServiceServicer_to_server(Refusing(), server.grpc)
    address = await server.start()
    try:
        async with open_channel(address, tls=tls_of(made, "kvd"), role=Role.MACHINE) as channel:
            call: Any = PromptServiceStub(channel).Run
            assert await call(timeout=CALL_S).code() is grpc.StatusCode.PERMISSION_DENIED
    finally:
        await server.stop(0)


async def test_a_slow_handshake_is_waited_for(made: Path):
    """A loaded host answers late: the attempt to connect must not be given up before."""
    server = RpcServer(ANYWHERE, ["splitwise.v1.Router"], tls=tls_of(made, "router"))
    add_RouterServicer_to_server(Models(), server.grpc)
    address = await server.start()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1)  # the host's load
        to_server = await asyncio.open_connection(address.host, address.port)
        await asyncio.gather(pump(reader, to_server[1]), pump(to_server[0], writer))

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            target.write(data)
            await target.drain()
        target.close()

    listener = await asyncio.start_server(late, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    try:
        slow = Address("127.0.0.1", port)
        async with open_channel(slow, tls=tls_of(made, "client"), role=Role.ROUTER) as channel:
            await RouterStub(channel).ListModels(router_pb2.ListModelsRequest(), timeout=CALL_S)
    finally:
        listener.close()
        await server.stop(0)
