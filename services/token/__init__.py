"""The token service: a gRPC shell around one engine whose home pool is token."""
