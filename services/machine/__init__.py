"""The process of one machine: one engine, the prompt service and the token service around it."""
