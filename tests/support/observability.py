"""What the dashboard and the alert rules ask for."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import yaml

from tests.support.tables import ROOT, code, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

OBSERVABILITY = ROOT / "deploy" / "observability"
DASHBOARD = OBSERVABILITY / "grafana" / "dashboards" / "splitwise.json"
ALERTS = OBSERVABILITY / "prometheus" / "alerts.yml"


def panels() -> Iterator[dict[str, Any]]:
    """Yield the dashboard's panels that show something."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Yield (panel, expression), with Grafana's variables filled in."""
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")
            assert "$" not in expression, (panel["title"], expression)
            yield panel["title"], expression


def alerts() -> list[dict[str, Any]]:
    """Return the alert rules."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def names_in(expression: str) -> set[str]:
    """Return the metrics of ours that an expression names."""
    return set(re.findall(r"\bsplitwise_\w+", expression))


def series() -> set[str]:
    """Return every name that a query may use: the documented ones, histograms by their parts."""
    found = set()
    for row in rows("telemetry.md", "metric"):
        name = code(row["metric"])
        parts = ("_bucket", "_sum", "_count") if row["type"] == "histogram" else ("",)
        found |= {name + part for part in parts}
    return found
