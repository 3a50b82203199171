"""From protobuf answers to the client's types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitwise.client.types import (
    Candidate,
    Chunk,
    Cluster,
    ClusterPower,
    DecisionRecord,
    FinishReason,
    Generation,
    Machine,
    MachinePower,
    Model,
    Placement,
    Timing,
    TokenLogprob,
    Transfer,
    TransferMode,
)
from splitwise.errors import RemoteError, ServerError, UnavailableError
from splitwise.rpc.status import to_exception
from splitwise.rpc.v1 import common_pb2

if TYPE_CHECKING:
    import grpc

    from splitwise.config import Address
    from splitwise.rpc.v1 import router_pb2

FINISH = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
MODES = {
    common_pb2.TRANSFER_MODE_SERIALIZED: TransferMode.SERIALIZED,
    common_pb2.TRANSFER_MODE_LAYERWISE: TransferMode.LAYERWISE,
}
MICRO = 1e-6


def failure(error: grpc.RpcError, router: Address) -> RemoteError:
    """Return our exception for a failed call to `router`; says so when nobody listens there."""
    failed = to_exception(error)
    if isinstance(failed, UnavailableError) and "failed to connect" in failed.message:
        return UnavailableError(
            f"cannot reach the router at {router}: is it running? ({failed.message})", code=failed.code
        )
    return failed


class Collector:
    """Gathers the messages of one call into a `Generation`."""

    def __init__(self) -> None:
        self.started = False
        self.request_id = ""
        self._client_request_id = ""
        self._prompt_tokens = 0
        self._chunks: list[Chunk] = []
        self._finished: router_pb2.Finished | None = None

    def add(self, message: router_pb2.GenerateResponse) -> Chunk:
        """Take one message and return what it brought."""
        self.started = True
        self.request_id = message.request_id or self.request_id
        self._client_request_id = message.client_request_id or self._client_request_id
        self._prompt_tokens = message.prompt_tokens or self._prompt_tokens
        chunk = Chunk(message.text, tuple(message.token_ids), tuple(map(_logprob, message.logprobs)))
        self._chunks.append(chunk)
        if message.HasField("finished"):
            self._finished = message.finished
        return chunk

    def generation(self) -> Generation:
        """Return the whole answer; raises `ServerError` when the stream ended without its end."""
        done = self._finished
        if done is None:
            raise ServerError("the router ended the stream without saying why", code="INTERNAL")
        return Generation(
            request_id=self.request_id,
            client_request_id=self._client_request_id,
            text="".join(chunk.text for chunk in self._chunks),
            token_ids=tuple(token for chunk in self._chunks for token in chunk.token_ids),
            logprobs=tuple(logprob for chunk in self._chunks for logprob in chunk.logprobs),
            finish_reason=FINISH.get(done.reason),
            stop_matched=done.stop_matched,
            prompt_tokens=done.prompt_tokens or self._prompt_tokens,
            output_tokens=done.output_tokens,
            cached_prompt_tokens=done.cached_prompt_tokens,
            restarts=done.restarts,
            timing=_timing(done.timing),
            placement=Placement(
                done.placement.prompt_machine, done.placement.token_machine, done.placement.reason
            ),
            transfer=_transfer(done.transfer) if done.HasField("transfer") else None,
        )


def model(message: router_pb2.ModelDescription) -> Model:
    """Convert one model's description."""
    return Model(message.name, message.max_model_len, message.serving)


def cluster(message: router_pb2.ClusterDescription) -> Cluster:
    """Convert a cluster's description."""
    counters = {
        field.name: getattr(message.counters, field.name) for field in message.counters.DESCRIPTOR.fields
    }
    return Cluster(
        machines=tuple(map(_machine, message.machines)),
        models=tuple(map(model, message.models)),
        queued=message.queued,
        running=message.running,
        policy=message.policy,
        counters=counters,
        power=_cluster_power(message.power) if message.HasField("power") else None,
    )


def decisions(message: router_pb2.Explanation) -> list[DecisionRecord]:
    """Convert why a request ran where it ran."""
    return [
        DecisionRecord(
            at=record.at_us * MICRO,
            kind=record.kind,
            reason=record.reason,
            prompt_machine=record.prompt_machine,
            token_machine=record.token_machine,
            candidates=tuple(
                Candidate(
                    candidate.machine_id,
                    _word(common_pb2.Phase, candidate.phase),
                    _word(common_pb2.Pool, candidate.pool),
                    candidate.queue_tokens,
                    candidate.chosen,
                    candidate.kv_blocks_used,
                    candidate.kv_blocks,
                    candidate.cached_tokens,
                )
                for candidate in record.candidates
            ),
            left_out={
                "prompt": record.prompt_machines_left_out,
                "token": record.token_machines_left_out,
            },
        )
        for record in message.decisions
    ]


def _machine(status: router_pb2.MachineStatus) -> Machine:
    description, load = status.description, status.load
    return Machine(
        machine_id=description.identity.machine_id,
        home_pool=_word(common_pb2.Pool, description.home_pool),
        pool=_word(common_pb2.Pool, status.pool),
        pool_reason=status.pool_reason,
        state=status.state,
        address=description.address,
        node=description.node,
        kvd_address=description.kvd_address,
        model=description.model,
        engine=description.engine,
        prompt_requests=load.prompt_requests,
        token_requests=load.token_requests,
        pending_prompt_tokens=status.pending_prompt_tokens,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks=load.kv_blocks_total or description.kv_blocks,
        preemptions=load.preemptions,
        power_watts=load.power_watts,
        report_age=status.report_age_ms / 1000,
        power=_machine_power(status) if load.HasField("power") else None,
    )


def _machine_power(status: router_pb2.MachineStatus) -> MachinePower:
    power = status.load.power
    return MachinePower(
        gpus=power.gpus,
        requested=power.requested_watts,
        enforced=power.enforced_watts,
        draw=power.draw_watts,
        reason=power.reason,
        share=status.power_share_watts,
        share_reason=status.power_reason,
        problem=power.problem,
    )


def _cluster_power(power: router_pb2.PowerBudget) -> ClusterPower:
    return ClusterPower(
        budget=power.budget_watts,
        requested=power.requested_watts,
        enforced=power.enforced_watts,
        draw=power.draw_watts,
        missing=power.missing_watts,
        unmanaged=power.unmanaged,
    )


def _word(kind: Any, value: int) -> str:
    """Turn ``POOL_PROMPT`` into ``prompt``, and a value newer than this client into its number."""
    name: str = kind.Name(value) if value in kind.values() else f"_{value}"
    return name.partition("_")[2].lower()


def _logprob(message: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        message.token_id, message.logprob, {entry.token_id: entry.logprob for entry in message.top}
    )


def _timing(message: router_pb2.Timing) -> Timing:
    return Timing(
        queued=message.queued_us * MICRO,
        ttft=message.ttft_us * MICRO,
        second=message.second_us * MICRO,
        tbt_mean=message.tbt_mean_us * MICRO,
        tbt_max=message.tbt_max_us * MICRO,
        e2e=message.e2e_us * MICRO,
    )


def _transfer(message: common_pb2.TransferStats) -> Transfer:
    return Transfer(
        bytes=message.bytes,
        puts=message.puts,
        blocks=message.blocks,
        blocks_skipped=message.blocks_skipped,
        seconds=message.push_us * MICRO,
        exposed=message.exposed_us * MICRO,
        mode=MODES.get(message.mode),
        transport=message.transport,
    )
