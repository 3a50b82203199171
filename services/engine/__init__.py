"""Engines: the interface, the emulated engine, and vLLM with its KV connector."""
