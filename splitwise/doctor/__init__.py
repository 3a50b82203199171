"""Can this host run a cluster? Checks that say what they found and what to do about it.

What decides takes facts (text of ``/sys`` and ``/proc`` below a root, a probe's answer, a
driver's module), so that hosts which are not at hand can be judged, too.
"""

from splitwise.doctor.finding import Finding, Verdict

__all__ = ["Finding", "Verdict"]
