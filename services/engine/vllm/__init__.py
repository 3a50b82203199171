"""The vLLM engine: an adapter in the service's process, a KV connector inside the engine core.

Importing this package loads neither vLLM nor torch; `VllmEngine.start` does.

=================  ==================================================================
``settings``       what can be set
``engine``         `VllmEngine`: the engine interface on vLLM's ``AsyncLLM``
``sampling``       sampling parameters of the contract to vLLM's, per phase
``transfer``       what travels with a request into the engine core
``hotline``        socket and shared figures between adapter and engine core
``connector``      the class that vLLM loads; hooks only
``prompt_side``    scheduler side of outgoing transfers
``token_side``     scheduler side of incoming transfers
``worker_side``    KV memory, push plans, layer notices
``plan``           what the scheduler side tells the worker side with each step
``session``        which of an engine's processes speaks with the KV daemon, and for which rank
``ranks``          the sessions of all tensor-parallel ranks, as if they were one
``memory``         KV cache inside a memfd (``cuda_memory``: in a CUDA VMM allocation)
``geometry``       how vLLM lays out blocks, in the contract's words
``first_token``    what the V1 model runner lacks: a first token as output, seeds with chunks on CPUs
``launch``         environment and arguments of vLLM
``outputs``        vLLM's outputs to the contract's tokens
``folder``         the engine's folder of sockets
``leftovers``      what killed ranks leave in shared memory
=================  ==================================================================
"""

from services.engine.vllm.engine import VllmEngine
from services.engine.vllm.settings import VllmSettings, settings_from_options

__all__ = ["VllmEngine", "VllmSettings", "settings_from_options"]
