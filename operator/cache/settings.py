"""How long things may take in this package, in seconds, and why."""

from __future__ import annotations

# Pools and what belongs to them.

STREAM_CALM_SECONDS = 60.0
"""A stream of kopf's that ran this long restarts after the shortest delay."""

RELIST_DELAY_SECONDS = 5.0
"""kopf's streams, one for each namespace, mostly lose their place together: one list follows all of them."""

MAX_BATCH_SECONDS = 0.5
"""How long changes to a pool's parts are collected, per pod that it has: a pass costs more in a
larger pool, and a pool that is starting changes five times per pod."""

MAX_MOVING_BATCH_SECONDS = 2.0
"""The same while many pools move: they wait for the API server much longer than this."""

RATE_WINDOW_SECONDS = 5.0
"""Over which changes are counted: the few for each replica that one pool's update makes are too few to count as load."""

# Neighbours.

WATCH_TIMEOUT_SECONDS = 120.0
"""How long events are followed before the next list: a pool may have to wait for what a watch missed."""

LIST_RETRY_SECONDS = 1.0
"""The shortest pause between two watches: there may be hundreds."""

MAX_LIST_RETRY_SECONDS = 30.0
"""The longest: a list that a role forbids stays forbidden until somebody changes the role."""

# The queue.

BASE_BACKOFF_SECONDS = 0.5
"""After a pool's first failure, which is mostly a conflict with another writer."""

MAX_BACKOFF_SECONDS = 60.0
"""A pool that was corrected outside of its spec is looked at within a minute."""
