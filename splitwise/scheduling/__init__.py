"""The cluster scheduler (CLS) and the machine scheduler (MLS): pure decisions, no I/O.

Read in this order: ``events`` (what may happen), ``decisions`` (what is answered),
``states`` (the transition tables), then ``cluster`` and ``machine``.
"""
