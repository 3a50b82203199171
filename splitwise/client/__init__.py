"""Client SDK: text from a cluster, streaming, for threads (`Client`) and asyncio (`AsyncClient`).

    from splitwise.client import Client

    with Client() as client:                      # the cluster that `splitwise up` runs
        for piece in client.generate("Once upon a time", max_tokens=64):
            print(piece, end="", flush=True)

Errors are those of `splitwise.errors`, one class per kind of failure.
"""

from splitwise.client.aio import AsyncClient, AsyncStream
from splitwise.client.requests import SamplingOptions
from splitwise.client.retry import DEFAULT_RETRY, RetryPolicy, never
from splitwise.client.sync import Client, Stream
from splitwise.client.types import (
    Chunk,
    Cluster,
    ClusterPower,
    DecisionRecord,
    FinishReason,
    Generation,
    Machine,
    MachinePower,
    Message,
    Model,
    Placement,
    Timing,
    TokenLogprob,
    Transfer,
    TransferMode,
)

__all__ = [
    "DEFAULT_RETRY",
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "Cluster",
    "ClusterPower",
    "DecisionRecord",
    "FinishReason",
    "Generation",
    "Machine",
    "MachinePower",
    "Message",
    "Model",
    "Placement",
    "RetryPolicy",
    "SamplingOptions",
    "Stream",
    "Timing",
    "TokenLogprob",
    "Transfer",
    "TransferMode",
    "never",
]
