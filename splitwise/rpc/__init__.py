"""gRPC: generated stubs (`v1`), channels and servers, status codes as exceptions."""
