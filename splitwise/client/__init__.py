"""The client SDK: `Client` and `AsyncClient` for a Splitwise router."""
