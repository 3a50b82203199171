"""The table of who may call what, against the methods that there are."""

from __future__ import annotations

import pytest

from splitwise.rpc.identity import ALLOWED, Role, allowed_roles, server_name
from splitwise.rpc.v1 import kvd_pb2, machine_pb2, power_pb2, router_pb2

METHODS = {
    f"/{service.full_name}/{method.name}"
    for file in (router_pb2, machine_pb2, kvd_pb2, power_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
PEOPLE = {Role.CLIENT, Role.OPERATOR}
# Written out, so that a new method is refused by this test until somebody has decided.
EXPECTED = {
    "/splitwise.v1.Router/Generate": PEOPLE,
    "/splitwise.v1.Router/ListModels": PEOPLE,
    "/splitwise.v1.Router/DescribeCluster": PEOPLE,
    "/splitwise.v1.Router/WatchCluster": PEOPLE,
    "/splitwise.v1.Router/Explain": PEOPLE,
    "/splitwise.v1.Router/DrainMachine": {Role.OPERATOR},
    "/splitwise.v1.Router/Register": {Role.MACHINE},
    "/splitwise.v1.PromptService/Run": {Role.ROUTER},
    "/splitwise.v1.TokenService/Run": {Role.ROUTER},
    "/splitwise.v1.KvdPeer/Grant": {Role.KVD},
    "/splitwise.v1.KvdPeer/Revoke": {Role.KVD, Role.MACHINE},
    "/splitwise.v1.KvdPeer/Abandon": {Role.KVD},
    "/splitwise.v1.Kvd/Describe": {Role.MACHINE, Role.OPERATOR},
    "/splitwise.v1.Kvd/WatchTransfers": {Role.MACHINE, Role.OPERATOR},
    "/splitwise.v1.PowerAgent/Hold": {Role.MACHINE},
    "/splitwise.v1.PowerAgent/Release": {Role.MACHINE},
    "/splitwise.v1.PowerAgent/Describe": {Role.OPERATOR},
    "/splitwise.v1.PowerAgent/Suspend": {Role.OPERATOR},
}


def test_every_method_is_decided():
    assert set(EXPECTED) == METHODS


@pytest.mark.parametrize("method", sorted(EXPECTED))
def test_who_may_call(method: str):
    assert allowed_roles(method) == EXPECTED[method]


def test_every_line_of_the_table_stands_for_something():
    served = METHODS | {"/grpc.health.v1.Health/Check", "/grpc.reflection.v1alpha.ServerReflection/Info"}
    for prefix in ALLOWED:
        assert any(method.startswith(prefix) for method in served), prefix


@pytest.mark.parametrize(
    "method",
    ["", "/", "/splitwise.v1.Other/Generate", "splitwise.v1.Router/Generate", "/splitwise.v2.Router/Generate",
     "/splitwise.v1.RouterX/Generate", "/SPLITWISE.V1.ROUTER/Generate"],
)  # fmt: skip
def test_what_is_not_listed_is_for_nobody(method: str):
    assert allowed_roles(method) == frozenset()


def test_names():
    assert [server_name(role) for role in Role] == [
        f"{role}.splitwise" for role in ("router", "machine", "kvd", "power", "client", "operator")
    ]
