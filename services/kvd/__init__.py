"""The KV daemon: one per node, pushes KV blocks between engines."""
