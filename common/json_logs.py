"""Logging of worker and operator: one JSON object a line for a cluster, text for a terminal.

INFO means that something changed. Prompts, tokens and credentials are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from typing_extensions import override

WORKER_QUIET_LOGGERS = ("httpx", "httpcore", "uvicorn.error", "uvicorn.access")
"""Libraries of the worker that log each request and each start of a server at INFO."""

_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
}


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the record's extras but the `hidden` ones, and an error's traceback."""

    def __init__(self, hidden: Collection[str] = ()) -> None:
        super().__init__()
        self._skipped = _STANDARD_ATTRIBUTES | set(hidden)

    @override
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        for name, value in vars(record).items():
            if name not in self._skipped:
                line.setdefault(name, value)
        return json.dumps(line, default=str, ensure_ascii=False)


def configure_logging(
    level: str, log_format: str, *, quiet: Collection[str], hidden: Collection[str] = ()
) -> logging.Handler:
    """Send all logs to stderr and return the handler; a later call replaces an earlier one.

    Args:
        level: The lowest level that is logged, in upper or lower case.
        log_format: `json` or `text`.
        quiet: Loggers of libraries that log routine work at INFO; their warnings still come through.
        hidden: Extras that JSON lines leave out.
    """
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(hidden))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in quiet:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.root.level))
    return handler
