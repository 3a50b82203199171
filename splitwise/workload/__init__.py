"""Workloads: what arrives at a cluster, from real traces or made up.

``trace`` holds requests as flat arrays and says what is wrong with them, ``formats`` reads
and writes files chunk by chunk, ``describe`` sums a trace up in bounded memory, and
``synthesize`` makes new traces that look like given ones.
"""

from splitwise.workload.describe import Summary, describe, describe_chunks
from splitwise.workload.formats import Column, iter_chunks, load_trace, write_chunks, write_trace
from splitwise.workload.synthesize import synthesize
from splitwise.workload.trace import Trace, TraceError

__all__ = [
    "Column",
    "Summary",
    "Trace",
    "TraceError",
    "describe",
    "describe_chunks",
    "iter_chunks",
    "load_trace",
    "synthesize",
    "write_chunks",
    "write_trace",
]
