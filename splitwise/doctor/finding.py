"""One line of the doctor's answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """`failure`: a cluster cannot run here; `warning`: it can, with less."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's outcome; `remedy` says what to do when the verdict is not ok."""

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, Verdict.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """It works with less."""
    return Finding(check, Verdict.WARNING, found, remedy)


def failure(check: str, found: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(check, Verdict.FAILURE, found, remedy)
