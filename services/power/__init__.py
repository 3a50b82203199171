"""The power agent of one node."""
