"""Starting and supervising processes: the shell of every service, and `splitwise up`."""
