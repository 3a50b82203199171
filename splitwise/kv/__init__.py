"""KV blocks and transfers, pure: geometry, coalescing, transfer life cycle, integrity."""
