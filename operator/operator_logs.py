"""What the operator's logging adds to that of all our processes: a quiet kopf."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rollout_common import json_logs

from .settings import REPEATED_LOG_SECONDS

QUIET_LOGGERS = ("kopf", "aiohttp", "asyncio", "httpx", "httpcore", "urllib3", "kubernetes")
"""Libraries that log routine work at INFO; their warnings still come through."""

_KOPF_ATTRIBUTES = {"settings", "k8s_skip", "k8s_ref"}
"""What kopf attaches to its records for its own use."""


class LimitWarnings(logging.Filter):
    """Passes one warning a minute from each logger of a library: in an outage kopf logs every retry."""

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
    handler = json_logs.configure_logging(
        level, log_format, quiet=QUIET_LOGGERS, hidden=_KOPF_ATTRIBUTES
    )
    handler.addFilter(LimitWarnings("kopf"))
