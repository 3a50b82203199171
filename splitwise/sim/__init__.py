"""Event-driven simulator that runs the scheduler core of `splitwise.scheduling`."""
