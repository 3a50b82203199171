"""The cluster as operators see it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from services.router.journal import POOLS
from splitwise.rpc.v1.router_pb2 import ClusterDescription, MachineStatus, ModelDescription
from splitwise.scheduling import arrays

if TYPE_CHECKING:
    from services.router.dispatcher import Dispatcher
    from services.router.models import Models


def describe_models(dispatcher: Dispatcher, models: Models) -> list[ModelDescription]:
    """Return every model with whether it is served now."""
    groups = dispatcher.scheduler.fleet.groups
    return [
        ModelDescription(
            name=model.name,
            max_model_len=model.max_model_len,
            serving=model.name in groups and groups[model.name].serving > groups[model.name].paused,
        )
        for model in models
    ]


def describe_cluster(dispatcher: Dispatcher, models: Models) -> ClusterDescription:
    """Return the whole cluster."""
    scheduler = dispatcher.scheduler
    return ClusterDescription(
        machines=[_machine(dispatcher, name) for name in sorted(scheduler.fleet.machines)],
        models=describe_models(dispatcher, models),
        queued=scheduler.queued,
        running=scheduler.open_requests - scheduler.queued,
        policy=scheduler.settings.policy,
        counters=dispatcher.counters,
        power=dispatcher.power.describe(),
    )


def _machine(dispatcher: Dispatcher, name: str) -> MachineStatus:
    machine = dispatcher.scheduler.fleet.machines[name]
    link = dispatcher.links.get(name)
    numbers = dispatcher.scheduler.fleet.state.machines[:, machine.slot]
    status = MachineStatus(
        pool=POOLS[machine.pool],
        state=machine.condition,
        pending_prompt_tokens=max(0, int(numbers[arrays.PROMPT_TOKENS] + numbers[arrays.PROMPT_OFFSET])),
        pending_token_requests=max(0, int(numbers[arrays.TOKEN_REQUESTS] + numbers[arrays.TOKEN_OFFSET])),
        pool_reason=dispatcher.pool_reasons.get(name, "home"),
    )
    status.power_share_watts, status.power_reason = dispatcher.power.share(name)
    if link is not None and link.description is not None:
        status.description.CopyFrom(link.description)
        if link.load is not None:
            status.load.CopyFrom(link.load)
            status.report_age_ms = round((time.monotonic() - link.load_at) * 1e3)
    return status
