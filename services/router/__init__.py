"""The router: cluster scheduler, request life cycle and client API."""
