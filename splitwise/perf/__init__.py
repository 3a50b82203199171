"""The performance model: phase times, profile fitting, hardware catalogue, link model."""
