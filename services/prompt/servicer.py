"""`PromptService`: the prompt phase of requests, for routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.rpc.v1.machine_pb2_grpc import PromptServiceServicer
from splitwise.scheduling.events import Phase

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.machine.outbox import Outbox
    from services.machine.streams import Context, Streams
    from services.machine.works import WorkTable
    from splitwise.rpc.v1.machine_pb2 import MachineEvents, PromptCommand


class PromptServicer(PromptServiceServicer):
    """Prompt commands in, events out; the machine's engine is shared with the token service."""

    def __init__(self, streams: Streams, works: WorkTable) -> None:
        self._streams = streams
        self._works = works

    async def Run(
        self, request_iterator: AsyncIterator[PromptCommand], context: Context
    ) -> AsyncIterator[MachineEvents]:
        """Serve one router's control stream."""
        async for batch in self._streams.run(Phase.PROMPT, request_iterator, context, self._execute):
            yield batch

    def _execute(self, outbox: Outbox, command: PromptCommand) -> None:
        match command.WhichOneof("command"):
            case "start":
                self._works.start_prompt(outbox, command.start)
            case "cancel":
                self._works.cancel(Phase.PROMPT, command.cancel)
            case "power":
                self._streams.order_power(outbox, command.power)
