"""Structured log lines: one event name and fields, as JSON or readable text, on stderr.

Event names are fixed words with dots, such as ``service.ready``; what varies goes into
fields. Prompts, outputs and secrets never do: fields with such names are replaced.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, cast

import structlog

from splitwise.config import LogFormat

if TYPE_CHECKING:
    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

    from splitwise.config import TelemetrySettings

# Names under which a prompt, an output or a secret could slip into a log line.
WITHHELD = frozenset(
    {
        "prompt",
        "text",
        "messages",
        "content",
        "output",
        "token_ids",
        "stop",
        "api_key",
        "authorization",
        "key",
    }
)


def configure_logs(settings: TelemetrySettings, *, service: str, name: str = "") -> None:
    """Set up structlog and the standard library's logging for this process.

    Every line carries `service` (router, prompt, token, kvd) and, where given, `name` (which
    one). Lines of libraries (vLLM, gRPC) take the same way under the event ``library.log``.
    """
    as_json = settings.log_format is LogFormat.JSON or (
        settings.log_format is LogFormat.AUTO and not sys.stderr.isatty()
    )
    identity = {"service": service} | ({"name": name} if name else {})

    def identify(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {**identity, **event}

    shared: list[Processor] = [
        identify,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        withhold,
    ]
    renderer: Processor = (
        structlog.processors.JSONRenderer(default=str)
        if as_json
        # A traceback with local variables would show prompts.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), sort_keys=False, exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, renderer]
        if as_json
        else [*shared, renderer],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *([structlog.processors.format_exc_info] if as_json else []),
            renderer,
        ],
        foreign_pre_chain=[*shared, _as_library_event],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.getLogger().handlers[:] = [handler]
    set_log_level(settings.log_level)


def set_log_level(name: str) -> None:
    """Change the least severe lines that are written; `name` as in the settings."""
    level = logging.getLevelNamesMapping()[name.upper()]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    # Libraries speak of their own affairs below a warning; they do so only for debugging.
    logging.getLogger().setLevel(max(level, logging.WARNING) if level > logging.DEBUG else level)


def get_logger() -> FilteringBoundLogger:
    """Return a logger; call its ``info("event.name", field=value)`` and the like."""
    return cast("FilteringBoundLogger", structlog.get_logger())


def withhold(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace the values of fields that may hold a prompt, an output or a secret."""
    for field in WITHHELD & event.keys():
        event[field] = "[withheld]"
    return event


def _as_library_event(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event["message"] = event.pop("event")
    event["event"] = "library.log"
    return event
