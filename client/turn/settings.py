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

BORROWER_SECONDS = 10.0
"""For a worker to say on which devices it is, which it does at once."""

REASON_SECONDS = 5.0
"""For a worker to say why its engine reads no more: it notices within milliseconds, unless the engine died."""

LOAN_END_SECONDS = 30.0
"""For workers to give back a turn that was lent, whose engines free gigabytes or end, and for a thread that lends to end."""
