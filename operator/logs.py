"""Logging of the operator: one JSON object a line, or text for a person at a terminal."""

from __future__ import annotations

import datetime
import json
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

QUIET_LOGGERS = ("kopf", "aiohttp", "asyncio", "httpx", "httpcore", "urllib3", "kubernetes")
"""Libraries that log routine work at INFO; their warnings still come through."""

REPEATED_LOG_SECONDS = 60.0

_STANDARD_ATTRIBUTES = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_KOPF_ATTRIBUTES = {"settings", "k8s_skip", "k8s_ref"}
"""What kopf attaches to its records for its own use."""


class OperatorJsonFormatter(logging.Formatter):
    """One object a line: ts, level, logger, msg, the record's extras, and error with traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "ts": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        for name, value in vars(record).items():
            if (
                name not in _STANDARD_ATTRIBUTES
                and name not in _KOPF_ATTRIBUTES
                and name not in line
            ):
                line[name] = value
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class LimitWarnings(logging.Filter):
    """Lets one warning a minute pass of each of a library's loggers: in an outage kopf logs every retry."""

    def __init__(self, library: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._library = logging.Filter(library)
        self._clock = clock
        self._passed_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is another one, or the first of its logger for a minute."""
        if record.levelno != logging.WARNING or not self._library.filter(record):
            return True
        now = self._clock()
        if now - self._passed_at.get(record.name, -REPEATED_LOG_SECONDS) < REPEATED_LOG_SECONDS:
            return False
        self._passed_at[record.name] = now
        return True


def configure_logging(level: str, log_format: str) -> None:
    """Send all logs to stderr in this format; a later call replaces an earlier one."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(OperatorJsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    handler.addFilter(LimitWarnings("kopf"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))
