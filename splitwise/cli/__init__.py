"""The `splitwise` command."""
