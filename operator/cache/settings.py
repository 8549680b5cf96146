"""How long things may take in this package, and why."""

from __future__ import annotations

# kopf_streams.py

STREAM_BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)

STREAM_CALM_SECONDS = 60.0
"""Streams that ran this long restart after the shortest delay."""


# neighbour_informer.py

WATCH_TIMEOUT_SECONDS = 120.0
"""How long events are followed before the next list."""

LIST_RETRY_SECONDS = 1.0
"""Least time from one list to the next; doubled with each failure."""

MAX_LIST_RETRY_SECONDS = 30.0


# resync.py

RESYNC_RETRY_SECONDS = 2.0

MAX_RESYNC_RETRY_SECONDS = 30.0


# watch_events.py

RELIST_DELAY_SECONDS = 5.0

MAX_BATCH_SECONDS = 0.5
"""How long changes to a pool's parts are collected, per pod that it has: a pass costs more in a
larger pool, and a pool that is starting changes five times per pod."""


# workqueue.py

BASE_BACKOFF_SECONDS = 0.5

MAX_BACKOFF_SECONDS = 60.0
