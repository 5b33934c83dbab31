"""Logs: one line for each record, as text for people or as JSON for collectors."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

#: "auto": text where stderr is a terminal (a person reads it), JSON elsewhere (a collector does).
LogFormat = Literal["auto", "json", "text"]

#: Identity of the request being answered; copied into threads that work for it.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

#: One line for each request; its fields are in the record's ``request``.
request_log = logging.getLogger("cdmpp_server.request")


class JsonFormatter(logging.Formatter):
    """One JSON object in one line: time, level, logger, message, request fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, in ASCII: nothing that a client sends can break it."""
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
    """The same for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        """The message, with the request it belongs to."""
        line = super().formatMessage(record)
        if not hasattr(record, "request") and (identity := request_id.get()) is not None:
            line += f" (request {identity})"
        return line


def log_config(chosen: LogFormat, level: str = "INFO") -> dict[str, Any]:
    """For ``logging.config.dictConfig`` and uvicorn's ``log_config``: everything to stderr in one format.

    uvicorn's own access lines are left out: the service writes one for each request, with its route, its
    items and its identity.
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
    """One line for a request that was answered.

    The record is made here: finding out where in the code it comes from costs more than writing it.
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
