"""Settings of all property tests."""

from hypothesis import settings

# Kernels are compiled inside the first example, and the machine may be busy.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
