"""Log events are fixed words, every one is explained, and what could hold a prompt is withheld."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from splitwise.config import LogFormat, TelemetrySettings
from splitwise.telemetry import configure_logs, get_logger
from splitwise.telemetry.logs import WITHHELD
from tests.support.log_events import log_calls
from tests.support.tables import code, rows

FREE = {"exception", "and what the process is"}  # columns' words that no call names
BOUND = {"router", "phase", "agent", "peer", "transports"}  # fields that come from `bind`


def documented() -> dict[str, dict[str, str]]:
    return {code(row["event"]): row for row in rows("telemetry.md", "event")}


def test_every_event_is_a_literal_of_words_with_dots() -> None:
    for call in log_calls():
        assert call.event is not None, f"{call.where}: the event's name must be a literal"
        assert re.fullmatch(r"[a-z_]+\.[a-z_]+", call.event), call


def test_the_guide_explains_every_event_and_no_other() -> None:
    written = {call.event for call in log_calls()}
    table = documented()
    assert len(table) == len(rows("telemetry.md", "event"))
    assert table.keys() - {"library.log"} == written


def test_levels_and_fields_are_as_the_guide_says() -> None:
    table = documented()
    seen: dict[str, set[str]] = {}
    for call in log_calls():
        row = table[str(call.event)]
        assert call.level == row["level"], call
        fields = {field.strip() for field in row["fields"].split(",")} - {""}
        assert call.fields <= fields or "and what the process is" in fields, call
        seen.setdefault(str(call.event), set()).update(call.fields)
    for event, fields in seen.items():
        listed = {field.strip() for field in table[event]["fields"].split(",")} - {""} - FREE - BOUND
        # `service.loading` takes whatever the service adds.
        assert listed <= fields | ({"kind", "policy"} if event == "service.loading" else set()), event


def test_no_call_passes_a_field_that_would_be_withheld() -> None:
    for call in log_calls():
        assert not call.fields & WITHHELD, call


@pytest.mark.parametrize("form", [LogFormat.JSON, LogFormat.READABLE])
def test_withheld_fields_and_locals_of_tracebacks_never_show(
    form: LogFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logs(TelemetrySettings(log_format=form), service="router", name="r-1")
    for field in sorted(WITHHELD):
        get_logger().warning("test.event", **{field: "swordfish"})

    def fails() -> None:
        prompt = "swordfish"
        raise ValueError(len(prompt))

    try:
        fails()
    except ValueError:
        get_logger().exception("test.failed")
    written = stream.getvalue()
    assert "[withheld]" in written
    assert "ValueError: 9" in written
    assert "swordfish" not in written


def test_a_json_line_has_what_every_line_has(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logs(TelemetrySettings(log_format=LogFormat.JSON), service="kvd", name="node-1")
    get_logger().info("engine.attached", engine="prompt-0", megabytes=3)
    line = json.loads(stream.getvalue())
    moment = line.pop("timestamp")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", moment)
    assert line == {
        "service": "kvd",
        "name": "node-1",
        "event": "engine.attached",
        "level": "info",
        "engine": "prompt-0",
        "megabytes": 3,
    }
