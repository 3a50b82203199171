"""Caps in a whole cluster: router, emulated machines whose GPUs one agent holds, real processes."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from splitwise.launch.emulate import FLEET, fleet_gpus, parse_groups, write_fleet
from splitwise.launch.emulated_gpus import FILE_VARIABLE, EmulatedGpus, create_gpus
from splitwise.rpc.v1 import common_pb2, power_pb2
from tests.services.gateway import live_cluster
from tests.services.gateway.live_cluster import PATIENCE
from tests.services.power.agent import AgentProcess
from tests.services.router.cluster import ENGINE, RouterCluster, request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

GROUPS = parse_groups(["1xH100:prompt", "1xH100:token"])
MIXED = common_pb2.POOL_MIXED


class Gpus:
    """The emulated GPUs of the fleet, by machine."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "gpus.bin"
        self.models = fleet_gpus(GROUPS)
        create_gpus(self.file, [gpu for machine in self.models.values() for gpu in machine])
        self.gpus = EmulatedGpus(self.file)

    def of(self, machine: str) -> list[float]:
        """The limits of a machine's GPUs, in watts, each once."""
        places = [self.gpus.index(gpu.uuid) for gpu in self.models[machine]]
        return sorted({float(self.gpus.records["limit"][place]) / 1e3 for place in places})

    @property
    def limits(self) -> list[float]:
        return [float(limit) / 1e3 for limit in self.gpus.records["limit"]]


class PowerCluster(RouterCluster):
    """One node with a prompt and a token machine of eight GPUs each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gpus = Gpus(folder)
        self.agent = AgentProcess(folder, self.gpus)  # type: ignore[arg-type]

    async def start(self, *router: str, **engine: Any) -> None:
        await self.start_router(*router)
        await self.agent.start("--recap_after_s", "0.2")
        await self.start_daemon("a")
        file = self.folder / "fleet.json"
        self.machines = write_fleet(
            file,
            GROUPS,
            routers=[self.address],
            kvd_socket=self.folder / "a.sock",
            kvd_address=self._addresses["a"],
            node="a",
            options={**ENGINE, **engine},
            power_agent=self.agent.address,
            gpu_file=self.gpus.file,
        )
        self._started.append(self.fleet)
        await self.fleet.start(*FLEET, str(file))
        await self.until_serving(len(self.machines))

    async def until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.gpus.limits
            await asyncio.sleep(0.01)

    async def until_power(self, condition: Callable[[dict[str, Any]], bool]) -> Any:
        """Wait until the machines' status, by id, is so; returns the cluster."""
        return await self.until_cluster(
            lambda cluster: condition({m.description.identity.machine_id: m for m in cluster.machines})
        )

    async def stop(self) -> None:
        await super().stop()
        await self.agent.stop()


@pytest_asyncio.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PowerCluster]:
    made = PowerCluster(tmp_path)
    monkeypatch.setitem(live_cluster.ENVIRONMENT, FILE_VARIABLE, str(made.gpus.file))
    yield made
    await made.stop()


async def test_a_token_machine_is_capped_while_it_is_one(cluster: PowerCluster) -> None:
    await cluster.start(time_scale=1.0)
    await cluster.until(lambda: cluster.gpus.of("token-0") == [350])
    assert cluster.gpus.of("prompt-0") == [700]
    seen = await cluster.until_power(lambda machines: machines["token-0"].load.power.enforced_watts == 2800)
    token = next(m for m in seen.machines if m.description.identity.machine_id == "token-0")
    assert (token.load.power.gpus, token.load.power.reason, token.load.power.problem) == (8, "token-cap", "")
    assert token.load.power_watts == pytest.approx(0.15 * 8 * 700)  # idle: the power model's share
    assert (seen.power.enforced_watts, seen.power.budget_watts, seen.power.unmanaged) == (8400, 0, 0)

    # More prompts than one machine may have waiting: the token machine is borrowed for them.
    asked = [asyncio.create_task(cluster.ask(request(max_tokens=2))) for _ in range(60)]
    await cluster.until(lambda: cluster.gpus.of("token-0") == [700])
    described = await cluster.agent.stub.Describe(power_pb2.DescribePowerRequest())
    assert {gpu.reason for gpu in described.gpus if list(gpu.machines) == ["token-0"]} <= {"borrowed", "held"}
    answers = await asyncio.gather(*asked)
    assert all(answer.error is None for answer in answers)
    await cluster.until(lambda: cluster.gpus.of("token-0") == [350])  # it went home
    drawn = await cluster.until_free()
    assert all(machine.load.power_watts > 0 for machine in drawn.machines)


async def test_the_cluster_s_budget_is_kept_while_a_machine_is_borrowed(cluster: PowerCluster) -> None:
    budget = 7000.0
    await cluster.start("--power_budget_watts", str(budget), time_scale=1.0)
    # The token machine gives first: 5,600 W for prompts leave it 1,400 W, below its floor of 1,600 W.
    await cluster.until(lambda: sum(cluster.gpus.limits) == budget)
    assert cluster.gpus.of("token-0") == [200]
    assert cluster.gpus.of("prompt-0") == [675]
    seen = await cluster.until_power(lambda machines: machines["prompt-0"].load.power.enforced_watts == 5400)
    shares = {m.description.identity.machine_id: (m.power_share_watts, m.power_reason) for m in seen.machines}
    assert shares == {"prompt-0": (5400, "reduced"), "token-0": (1600, "at-floor")}

    sums: list[float] = []
    asked = [asyncio.create_task(cluster.ask(request(max_tokens=2))) for _ in range(60)]

    def both_have_half() -> bool:
        sums.append(sum(cluster.gpus.limits))
        return sum(sums[-1:]) <= budget and cluster.gpus.of("token-0")[0] > 400

    await cluster.until(both_have_half)
    await asyncio.gather(*asked)
    await cluster.until(lambda: sums.append(sum(cluster.gpus.limits)) or cluster.gpus.of("token-0") == [200])
    assert max(sums) <= budget


async def test_a_budget_below_the_floors_is_said(cluster: PowerCluster) -> None:
    await cluster.start("--power_budget_watts", "3000")
    await cluster.until(lambda: set(cluster.gpus.limits) == {200.0})
    (line,) = await cluster.router.said("power.budget_unmet")
    assert line["missing_watts"] == 200
    assert (await cluster.describe()).power.missing_watts == 200


async def test_a_machine_that_is_killed_gives_its_gpus_back(cluster: PowerCluster) -> None:
    await cluster.start()
    await cluster.until(lambda: cluster.gpus.of("token-0") == [350])
    await cluster.fleet.stop()  # each machine releases its GPUs
    await cluster.until(lambda: set(cluster.gpus.limits) == {700.0}, seconds=3)  # before any lease ends
    gpus = [gpu.uuid for gpu in cluster.gpus.models["token-0"]]
    machine = await cluster.start_machine(
        *("a", "token-0", "token", "--power_agent", cluster.agent.address, "--gpus", ",".join(gpus)),
        gpu_file=str(cluster.gpus.file),
        gpus=gpus,
    )
    await cluster.until(lambda: cluster.gpus.of("token-0") == [350])
    machine.process.kill()
    await cluster.until(lambda: cluster.gpus.of("token-0") == [700])
    notes = await cluster.agent.process.said("power.note")
    assert [(note["code"], note["subject"]) for note in notes] == [("lease-expired", "token-0")]


async def test_an_agent_that_is_killed_and_comes_back(cluster: PowerCluster) -> None:
    await cluster.start()
    await cluster.until_power(lambda machines: machines["token-0"].load.power.enforced_watts == 2800)
    await cluster.until_power(lambda machines: machines["prompt-0"].load.power.enforced_watts == 5600)
    await cluster.agent.kill()
    await cluster.until_power(lambda machines: all(m.load.power.problem for m in machines.values()))
    assert (await cluster.ask(request(max_tokens=4))).error is None  # requests do not need it
    assert cluster.gpus.of("token-0") == [350]
    await cluster.agent.start("--recap_after_s", "0.2")
    restored = await cluster.agent.process.said("power.limit_set", 8)
    assert {line["reason"] for line in restored[:8]} == {"returned"}
    await cluster.until(lambda: cluster.gpus.of("token-0") == [350])  # the machine is still one
    seen = await cluster.until_power(
        lambda machines: not any(m.load.power.problem for m in machines.values())
    )
    assert seen.power.enforced_watts <= 11_200
    await cluster.agent.stop()
    assert set(cluster.gpus.limits) == {700.0}
    await cluster.agent.start()


async def test_status_shows_power(cluster: PowerCluster) -> None:
    await cluster.start("--power_budget_watts", "9000")
    await cluster.until_power(lambda machines: machines["token-0"].load.power.enforced_watts == 2800)
    shown = await command("status", "--router", cluster.address, "--json")
    state = json.loads(shown)
    machine = next(m for m in state["machines"] if m["machine_id"] == "token-0")
    assert machine["power"]["requested"] == machine["power"]["enforced"] == machine["power"]["share"] == 2800
    assert (state["power"]["budget"], state["power"]["enforced"]) == (9000, 8400)
    text = await command("status", "--router", cluster.address)
    assert "power  budget 9000 W, limits 8400 W" in text
    node = json.loads(await command("power", "status", "--agent", cluster.agent.address, "--json"))
    assert (node["token_cap"], len(node["gpus"])) == ("50%", 16)
    suspended = await command("power", "restore", "--agent", cluster.agent.address)
    assert "suspended" in suspended
    assert set(cluster.gpus.limits) == {700.0}
    assert "capping" in await command("power", "resume", "--agent", cluster.agent.address)
    await cluster.until(lambda: cluster.gpus.of("token-0") == [350])


async def test_an_agent_that_is_not_there_is_said(tmp_path: Path) -> None:
    said = await command("power", "status", "--agent", "127.0.0.1:1", code=69)
    assert "cannot reach the power agent at 127.0.0.1:1" in said
    assert "--restore" in said


async def command(*words: str, code: int = 0) -> str:
    """Run the `splitwise` command; returns all that it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "splitwise.cli.main", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**live_cluster.ENVIRONMENT, "COLUMNS": "200"},
    )
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == code, out.decode()
    return out.decode()
