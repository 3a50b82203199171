"""Log lines of child processes: read as events where they are ours, else as plain text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

# Fields that every line has and that the merged log shows elsewhere or not at all.
COMMON = frozenset({"event", "service", "name", "level", "timestamp"})
ALARM = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|^Traceback|Error: ")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of one process. `event` is empty for lines that are not ours."""

    text: str
    event: str = ""
    level: str = "debug"
    source: str = ""  # the name of the process that wrote it, as it calls itself
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The line as people read it."""
        if not self.event:
            return self.text
        words = [f"{name}={value}" for name, value in self.fields.items() if name != "exception"]
        trace = f"\n{self.fields['exception']}" if "exception" in self.fields else ""
        return " ".join([self.event, *words]) + trace


def read_line(raw: bytes) -> LogLine:
    """Read one line of output; anything that is not one of our events stays text."""
    text = raw.decode("utf-8", "replace").rstrip()
    if text.startswith("{"):
        try:
            content = json.loads(text)
        except ValueError:
            content = None
        if isinstance(content, dict) and isinstance(content.get("event"), str):
            fields = {
                name: value for name, value in content.items() if name not in COMMON and value is not None
            }
            level, source = str(content.get("level", "info")), str(content.get("name", ""))
            return LogLine(text, content["event"], level, source, fields)
    return LogLine(text, level="error" if ALARM.search(text) else "debug")
