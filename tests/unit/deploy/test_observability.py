"""Alert rules and dashboard: whole, of metrics that exist, and accepted by Prometheus' own tool."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.observability import (
    ALERTS,
    DASHBOARD,
    OBSERVABILITY,
    alerts,
    dashboard_queries,
    names_in,
    panels,
    series,
)
from tests.support.prometheus import find, needs_prometheus

if TYPE_CHECKING:
    from pathlib import Path

PROMETHEUS = OBSERVABILITY / "prometheus"


def promtool(*arguments: str, at: Path = PROMETHEUS) -> subprocess.CompletedProcess[str]:
    program = find("promtool")
    assert program is not None
    return subprocess.run([program, *arguments], cwd=at, capture_output=True, text=True, check=False)


def test_dashboard_and_alerts_name_only_metrics_that_are_documented() -> None:
    known = series()
    for where, expression in [*dashboard_queries(), *((rule["alert"], rule["expr"]) for rule in alerts())]:
        assert names_in(expression) <= known, (where, names_in(expression) - known)


def test_every_documented_metric_is_on_the_dashboard() -> None:
    shown = {name for _, expression in dashboard_queries() for name in names_in(expression)}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    known = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series()}
    # Numbers for looking closer, once the dashboard has said where.
    assert known - shown <= {
        "splitwise_gateway_streams_failed_total",
        "splitwise_gateway_streams_stalled_total",
        "splitwise_router_registrations_refused_total",
    }


def test_every_alert_says_how_bad_it_is_and_what_to_do_and_is_tried() -> None:
    tried = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    fired = {
        re.search(r'alertname="(\w+)"', sample["labels"])[1]  # type: ignore[index]
        for test in tried
        for check in test["promql_expr_test"]
        for sample in check["exp_samples"]
    }
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names))
    assert fired == set(names)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action"}


def test_the_dashboard_is_what_grafana_loads() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["uid"] == "splitwise"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert variables == {"datasource", "model"}
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references))
    provisioned = yaml.safe_load(
        (OBSERVABILITY / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )
    assert provisioned["datasources"][0]["type"] == "prometheus"


@needs_prometheus
def test_promtool_takes_the_configuration_and_the_rules() -> None:
    checked = promtool("check", "config", "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(alerts())} rules found" in checked.stdout


@needs_prometheus
def test_the_alerts_fire_when_they_should_and_only_then() -> None:
    tried = promtool("test", "rules", "alerts_test.yml")
    assert tried.returncode == 0, tried.stdout + tried.stderr


@needs_prometheus
@pytest.mark.parametrize("change", [("> 0.01", "> 0.5"), ("for: 5m", "for: 0m"), ('"failed"', '"finished"')])
def test_a_wrong_alert_is_found_out(tmp_path: Path, change: tuple[str, str]) -> None:
    rules = ALERTS.read_text()
    assert change[0] in rules
    (tmp_path / "alerts.yml").write_text(rules.replace(*change))
    (tmp_path / "alerts_test.yml").write_text((PROMETHEUS / "alerts_test.yml").read_text())
    assert promtool("test", "rules", "alerts_test.yml", at=tmp_path).returncode != 0


@needs_prometheus
def test_every_query_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, (_, expression) in enumerate(dashboard_queries())
    ]
    file = tmp_path / "dashboard.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = promtool("check", "rules", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr
