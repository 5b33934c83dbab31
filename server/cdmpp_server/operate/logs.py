"""Log formats: one line per record, as text for people or as JSON for log collectors."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from cdmpp_server.settings import LogFormat

#: Id of the current request; threads that work for the request inherit it.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

#: Logger of one record per request; the fields are in the record's ``request`` attribute.
request_log = logging.getLogger("cdmpp_server.request")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, request fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line in ASCII, so that no text of a client can break it."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields: dict[str, Any] | None = getattr(record, "request", None)
        if fields is None:
            line["message"] = record.getMessage()
            if (identity := request_id.get()) is not None:
                line["request_id"] = identity
        else:
            line["message"] = "request"
            line |= fields
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """Formats a record as one line of text."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        """Return the message, with the id of its request."""
        line = super().formatMessage(record)
        if not hasattr(record, "request") and (identity := request_id.get()) is not None:
            line += f" (request {identity})"
        return line


def log_config(chosen: LogFormat, level: str = "INFO") -> dict[str, Any]:
    """Return a configuration for ``logging.config.dictConfig`` that writes everything to stderr.

    uvicorn's access log is off: the service logs each request itself, with route, items and id.
    """
    if chosen == "auto":
        chosen = "text" if sys.stderr.isatty() else "json"
    formatter = JsonFormatter if chosen == "json" else TextFormatter
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"level": "WARNING", "handlers": ["stderr"]},
        "loggers": {
            "cdmpp_server": {"level": level},
            "uvicorn": {"level": level},
            "uvicorn.access": {"level": "CRITICAL"},
        },
    }


def log_request(fields: dict[str, Any], level: int = logging.INFO) -> None:
    """Log one request.

    The record is created directly: finding its place in the code would cost more than writing it.
    """
    if request_log.isEnabledFor(level):
        record = logging.LogRecord(
            request_log.name,
            level,
            __file__,
            0,
            "%s %s %d %.1f ms",
            (fields["method"], fields["route"], fields["status"], 1e3 * fields["duration_s"]),
            None,
        )
        record.request = fields
        request_log.handle(record)
