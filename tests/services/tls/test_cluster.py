"""A whole cluster with mutual TLS: it answers who it should, and nobody else."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.engine.emulated import settings_from_options
from services.engine.emulated.expected import expected_tokens
from splitwise.client import AsyncClient
from splitwise.client.retry import never
from splitwise.errors import NotAllowedError, UnavailableError
from splitwise.rpc.channels import CHANNEL_OPTIONS, open_channel
from splitwise.rpc.identity import Role, server_name
from splitwise.rpc.v1 import common_pb2, kvd_pb2, machine_pb2, router_pb2
from splitwise.rpc.v1.kvd_pb2_grpc import KvdPeerStub, KvdStub
from splitwise.rpc.v1.machine_pb2_grpc import PromptServiceStub, TokenServiceStub
from splitwise.rpc.v1.router_pb2_grpc import RouterStub
from splitwise.text import ByteVocabulary
from tests.services.tls.cluster import ENGINE, TlsCluster, ask, tls_of

if TYPE_CHECKING:
    from pathlib import Path

    from splitwise.config import TlsSettings

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
Code = grpc.StatusCode
SETTINGS = settings_from_options(ENGINE)
PROMPTS = {"short": list(range(1, 40)), "long": list(range(1, 1201))}
CALL_S = 30.0


def keys_in(folder: Path) -> list[str]:
    return [file.read_text() for file in folder.glob("*.key")]


def router(cluster: TlsCluster, tls: TlsSettings | None) -> grpc.aio.Channel:
    return open_channel(cluster.router_address, tls=tls, role=Role.ROUTER)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", ["client", "operator"])
async def test_a_client_gets_the_right_text(cluster: TlsCluster, name: str, prompt: str):
    """The KV cache goes from daemon a to daemon b, serialized or layer by layer."""
    ids = PROMPTS[prompt]
    tokens: list[int] = []
    text = ""
    async with router(cluster, cluster.tls(name)) as channel:
        async for message in RouterStub(channel).Generate(ask(ids, 8), timeout=CALL_S):
            tokens += message.token_ids
            text += message.text
    wanted = expected_tokens(SETTINGS, ids, 8, ignore_eos=True)
    assert tokens == wanted
    detokenizer = ByteVocabulary(SETTINGS.vocab_size).detokenizer()
    assert text == detokenizer.push(wanted) + detokenizer.flush()


async def test_the_transfer_went_between_the_daemons(cluster: TlsCluster):
    async def counters(node: str) -> Any:
        address = cluster.kvd_addresses[node]
        async with open_channel(address, tls=cluster.tls("operator"), role=Role.KVD) as channel:
            return (await KvdStub(channel).Describe(kvd_pb2.DescribeKvdRequest(), timeout=CALL_S)).counters

    before = await counters("a"), await counters("b")
    async with AsyncClient(cluster.router_address, tls=cluster.tls("client")) as client:
        stream = client.generate(PROMPTS["long"], max_tokens=3, temperature=0.0, ignore_eos=True)
        answer = await stream.result()
    assert list(answer.token_ids) == expected_tokens(SETTINGS, PROMPTS["long"], 3, ignore_eos=True)
    assert (await counters("a")).bytes_pushed > before[0].bytes_pushed
    assert (await counters("b")).grants > before[1].grants


async def test_without_a_certificate_nothing_is_answered(cluster: TlsCluster):
    """Plain TCP, and TLS that trusts the CA but shows no certificate."""
    anonymous = grpc.ssl_channel_credentials((cluster.certificates / "ca.pem").read_bytes())
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", server_name(Role.ROUTER))]
    for channel in (
        router(cluster, None),
        grpc.aio.secure_channel(str(cluster.router_address), anonymous, options),
    ):
        async with channel:
            code, _ = await cluster.refusal(RouterStub(channel).Generate(ask([1], 1), timeout=CALL_S))
            assert code is Code.UNAVAILABLE
            health = health_pb2_grpc.HealthStub(channel)
            code, _ = await cluster.refusal(health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S))
            assert code is Code.UNAVAILABLE


async def test_another_ca_is_refused_by_both_ends(cluster: TlsCluster, strangers: Path):
    async with router(cluster, tls_of(strangers, "client")) as channel:
        code, message = await cluster.refusal(RouterStub(channel).Generate(ask([1], 1), timeout=CALL_S))
    assert code is Code.UNAVAILABLE
    assert "CERTIFICATE_VERIFY_FAILED" in message  # it is the client that does not trust the router
    shown = tls_of(strangers, "client", ca=cluster.certificates)
    async with router(cluster, shown) as channel:
        code, _ = await cluster.refusal(RouterStub(channel).Generate(ask([1], 1), timeout=CALL_S))
    assert code is Code.UNAVAILABLE
    # and a daemon does not listen to a stranger's daemon
    shown = tls_of(strangers, "kvd", ca=cluster.certificates)
    async with open_channel(cluster.kvd_addresses["a"], tls=shown, role=Role.KVD) as channel:
        code, _ = await cluster.refusal(KvdPeerStub(channel).Grant(kvd_pb2.GrantRequest(), timeout=CALL_S))
    assert code is Code.UNAVAILABLE


async def test_the_sdk_says_why_it_cannot_connect(cluster: TlsCluster, strangers: Path):
    for tls, why in (
        (tls_of(strangers, "client"), "does not verify with our tls.ca"),
        (tls_of(strangers, "client", ca=cluster.certificates), "only certificates of its own tls.ca"),
        (None, "only certificates of its own tls.ca"),
    ):
        async with AsyncClient(cluster.router_address, tls=tls, retry=never) as client:
            with pytest.raises(UnavailableError, match=why):
                await client.generate("x", max_tokens=1, timeout=CALL_S).result()
    async with AsyncClient(cluster.machines["prompt-0"], tls=cluster.tls("client"), retry=never) as client:
        with pytest.raises(UnavailableError, match="certificate is for another role"):
            await client.generate("x", max_tokens=1, timeout=CALL_S).result()
    async with AsyncClient(cluster.router_address, tls=cluster.tls("machine"), retry=never) as client:
        with pytest.raises(NotAllowedError, match="is for machine; needs client or operator"):
            await client.generate("x", max_tokens=1, timeout=CALL_S).result()


async def test_a_certificate_opens_only_its_roles_methods(cluster: TlsCluster):
    """Every kind of method with a wrong role: PERMISSION_DENIED that names both roles."""
    machine = common_pb2.MachineDescription(
        identity=common_pb2.MachineIdentity(machine_id="intruder", incarnation=1)
    )
    register = router_pb2.RegisterRequest(machine=machine)
    a, b = cluster.kvd_addresses["a"], cluster.kvd_addresses["b"]
    prompt, token = cluster.machines["prompt-0"], cluster.machines["token-0"]

    def on_router(method: str, request: Any) -> tuple[Any, ...]:
        return cluster.router_address, Role.ROUTER, RouterStub, method, request

    grant = (a, Role.KVD, KvdPeerStub, "Grant", kvd_pb2.GrantRequest())
    revoke = (b, Role.KVD, KvdPeerStub, "Revoke", kvd_pb2.RevokeRequest())
    watch = (a, Role.KVD, KvdStub, "WatchTransfers", kvd_pb2.WatchTransfersRequest(engine_id="x"))
    hello = machine_pb2.Hello(router_id="intruder")
    run_prompt = (prompt, Role.MACHINE, PromptServiceStub, "Run", [machine_pb2.PromptCommand(hello=hello)])
    run_token = (token, Role.MACHINE, TokenServiceStub, "Run", [machine_pb2.TokenCommand(hello=hello)])
    drain = on_router("DrainMachine", router_pb2.DrainMachineRequest(machine_id="prompt-0"))
    for name, (address, role, stub, method, request), needs in (
        ("machine", on_router("Generate", ask([1], 1)), "client or operator"),
        ("kvd", on_router("Generate", ask([1], 1)), "client or operator"),
        ("router", on_router("DescribeCluster", router_pb2.DescribeClusterRequest()), "client or operator"),
        ("client", on_router("Register", register), "machine"),
        ("operator", on_router("Register", register), "machine"),
        ("client", drain, "operator"),
        ("client", grant, "kvd"),
        ("router", grant, "kvd"),
        ("machine", grant, "kvd"),  # it may tell of a revoke, and not grant
        ("client", revoke, "kvd or machine"),
        ("client", watch, "machine or operator"),
        ("client", run_prompt, "router"),
        ("machine", run_prompt, "router"),
        ("kvd", run_token, "router"),
    ):
        async with open_channel(address, tls=cluster.tls(name), role=role) as channel:
            call = getattr(stub(channel), method)
            sent = iter(request) if isinstance(request, list) else request
            code, message = await cluster.refusal(call(sent, timeout=CALL_S))
        assert (code, message.partition(": ")[2]) == (
            Code.PERMISSION_DENIED,
            f"the certificate is for {name}; needs {needs}",
        ), (name, method, code, message)
    async with router(cluster, cluster.tls("client")) as channel:
        state = await RouterStub(channel).DescribeCluster(router_pb2.DescribeClusterRequest(), timeout=CALL_S)
    assert {m.description.identity.machine_id for m in state.machines} == {"prompt-0", "token-0"}
    assert [m.state for m in state.machines] == ["serving"] * 2


async def test_a_name_is_worth_nothing_at_another_role(cluster: TlsCluster):
    """A caller that wanted a machine and reached a daemon stops before it says anything."""
    for wanted in (Role.ROUTER, Role.MACHINE, Role.CLIENT):
        async with open_channel(
            cluster.kvd_addresses["a"], tls=cluster.tls("router"), role=wanted
        ) as channel:
            code, message = await cluster.refusal(
                KvdPeerStub(channel).Grant(kvd_pb2.GrantRequest(), timeout=CALL_S)
            )
        assert code is Code.UNAVAILABLE
        assert "Hostname Verification Check failed" in message


async def test_every_role_may_ask_for_health(cluster: TlsCluster):
    for role in Role:
        async with router(cluster, cluster.tls(role)) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=CALL_S
            )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_every_port_speaks_tls_1_2_or_newer(cluster: TlsCluster):
    addresses = [cluster.router_address, *cluster.kvd_addresses.values(), *cluster.machines.values()]
    for address in addresses:
        context = ssl.create_default_context(cafile=str(cluster.certificates / "ca.pem"))
        context.check_hostname = False
        context.load_cert_chain(cluster.certificates / "client.pem", cluster.certificates / "client.key")
        context.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
        assert writer.get_extra_info("ssl_object").version() in {"TLSv1.2", "TLSv1.3"}
        writer.close()


async def test_the_cluster_itself_was_refused_nothing(cluster: TlsCluster):
    """Also what a request can do without: the machines' view of their daemons' transfers."""
    logs = cluster.logs()
    for event in ("kvd.away", "registration.failed", "transfer.revoke_failed", "peer.lost"):
        assert f'"{event}"' not in logs


async def test_keys_are_in_no_log(cluster: TlsCluster, strangers: Path):
    """Runs last: refused and served calls have been logged by then."""
    logs = cluster.logs()
    assert "service.ready" in logs
    assert "PRIVATE" not in logs
    keys = [*keys_in(cluster.certificates), *keys_in(strangers)]
    assert len(keys) == 2 * (1 + len(Role)) + 2
    for key in keys:
        for line in key.splitlines()[1:-1]:
            assert line not in logs
    assert "rpc.key_open" not in logs
    assert "rpc.plaintext" not in logs
