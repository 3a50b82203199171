"""A cluster for the dashboard: machines of two pools with borrowed ones, and requests over time."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.router.dashboard import RecentRequests, RequestRecord
from services.router.dashboard.recent import TransferRecord
from splitwise.errors import NotFoundError
from splitwise.rpc.v1 import common_pb2, router_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable


def machine(name: str, home: int, pool: int, state: str, rng: random.Random) -> router_pb2.MachineStatus:
    waiting = rng.randrange(3)
    return router_pb2.MachineStatus(
        description=common_pb2.MachineDescription(
            identity=common_pb2.MachineIdentity(machine_id=name, incarnation=1),
            home_pool=home,
            model="llama2-70b",
            engine="emulated 0.1",
            node=f"node-{name}",
            kv_blocks=1000,
            max_running=64,
        ),
        pool=pool,
        state=state,
        load=common_pb2.LoadReport(
            prompt_requests=rng.randrange(4),
            token_requests=waiting + rng.randrange(40),
            token_waiting=waiting,
            kv_blocks_used=rng.randrange(1000),
            kv_blocks_total=1000,
            power_watts=rng.uniform(1000, 2600),
            power=common_pb2.PowerReport(gpus=8, enforced_watts=2800, reason="token-cap"),
        ),
        pending_prompt_tokens=rng.randrange(6000),
        report_age_ms=120,
        pool_reason="prompt-queues-over-threshold" if pool == common_pb2.POOL_MIXED else "",
    )


@dataclass
class ScriptedCluster:
    """`prompt` and `token` machines; every tenth is borrowed, drains or is lost."""

    prompt: int = 2
    token: int = 2
    recent: RecentRequests = field(default_factory=RecentRequests)
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    open: list[RequestRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_names = [f"prompt-{index}" for index in range(self.prompt)]
        self.token_names = [f"token-{index}" for index in range(self.token)]
        self._cluster = router_pb2.ClusterDescription(
            machines=[*self._machines()],
            models=[router_pb2.ModelDescription(name="llama2-70b", serving=True)],
            queued=3,
            running=41,
            policy="jsq",
            power=router_pb2.PowerBudget(budget_watts=200_000, enforced_watts=182_000, draw_watts=90_000),
            counters=router_pb2.RequestCounters(received=900, finished=850, restarted=4, rejected=2),
        )

    def _machines(self) -> Iterable[router_pb2.MachineStatus]:
        states = {1: "draining", 2: "lost"}
        for names, home in (
            (self.prompt_names, common_pb2.POOL_PROMPT),
            (self.token_names, common_pb2.POOL_TOKEN),
        ):
            for index, name in enumerate(names):
                borrowed = index % 10 == 9
                pool = common_pb2.POOL_MIXED if borrowed else home
                state = (
                    "borrowed" if borrowed else states.get(index % 20, "serving") if index > 2 else "serving"
                )
                yield machine(name, home, pool, state, self.rng)

    def fill(self, count: int, seconds: float) -> None:
        """Let `count` requests have run within the last `seconds`."""
        now = time.time() * 1e3
        for index in range(count):
            began = now - seconds * 1e3 * (1 - index / count)
            self.recent.add(self._record(f"request-{index}", began))
        for index in range(count // 20):
            record = self._record(f"open-{index}", now - self.rng.uniform(200, 4000), "running")
            self.open.append(record)

    def _record(self, name: str, began: float, outcome: str = "stop") -> RequestRecord:
        rng = self.rng
        tokens = rng.randrange(1, 300)
        prompt = rng.randrange(50, 4000)
        queued = rng.randrange(20_000)
        ttft = queued + 90 * prompt
        push = 30 * prompt
        layerwise = prompt >= 512
        exposed = rng.randrange(1500) if layerwise else push
        if rng.random() < 0.02 and outcome != "running":
            outcome = "UNAVAILABLE"
        return RequestRecord(
            request_id=name,
            model="llama2-70b",
            outcome=outcome,
            began_unix_ms=began,
            queued_us=queued,
            ttft_us=ttft,
            second_us=30_000 + exposed if tokens > 1 else 0,
            tbt_mean_us=rng.randrange(28_000, 45_000) if tokens > 2 else 0,
            e2e_us=ttft + exposed + tokens * 32_000,
            prompt_tokens=prompt,
            output_tokens=tokens,
            prompt_machine=rng.choice(self.prompt_names),
            token_machine=rng.choice(self.token_names),
            reason="jsq:prompt-pool",
            transfer=TransferRecord(
                bytes=prompt * 327_680,
                push_us=push,
                exposed_us=exposed,
                mode="layerwise" if layerwise else "serialized",
                transport="ucx",
            ),
        )

    def cluster(self) -> router_pb2.ClusterDescription:
        return self._cluster

    def running(self) -> Iterable[RequestRecord]:
        return self.open

    def explain(self, request_id: str) -> router_pb2.Explanation:
        if request_id.startswith("gone"):
            raise NotFoundError(f"request {request_id} is not known, or too long ago")
        candidates = [
            router_pb2.Candidate(
                machine_id=name,
                phase=common_pb2.PHASE_PROMPT,
                pool=common_pb2.POOL_PROMPT,
                queue_tokens=100 * index,
                chosen=index == 0,
            )
            for index, name in enumerate(self.prompt_names[:4])
        ]
        record = router_pb2.DecisionRecord(
            kind="assign",
            reason="jsq:prompt-pool",
            prompt_machine=self.prompt_names[0],
            token_machine=self.token_names[0],
            candidates=candidates,
            at_us=1500,
        )
        return router_pb2.Explanation(request_id=request_id, decisions=[record])
