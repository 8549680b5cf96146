"""Durations of this package, in seconds, each with its reason."""

from __future__ import annotations

UNLIMITED_SECONDS = 10 * 365 * 86400.0
"""Ten years: a number, because deadlines are computed from it."""

UNDO_TIMEOUT_SECONDS = 10.0
"""How long a failed turn tries to restore the pool's state before it says that it could not."""

TURN_RETRY_SECONDS = 0.5
"""Between two looks at a pool that another trainer's turn moves, which takes seconds."""

DEVICE_LOOKUP_SECONDS = 10.0
"""How long each request is repeated while the API server fails."""
