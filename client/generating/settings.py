"""How long things may take in this package, in seconds, and why."""

from __future__ import annotations

FIRST_PAUSE_SECONDS = 0.05
"""Pause before the second attempt: a brief error is over by then, and an attempt takes longer."""

MAX_PAUSE_SECONDS = 2.0
"""The pause doubles up to this: a replica that is back gets requests within two seconds."""

DEFAULT_RETRY_SECONDS = 1.0
"""When to ask a busy replica again that sends no Retry-After: about one request's time in a queue."""

ANSWER_GRACE_SECONDS = 2.0
"""How long after the deadline a worker may still report that it passed, with the last tokens."""

MAX_DEADLINE_SECONDS = 86400.0
"""The longest deadline that a worker accepts."""

DEFAULT_DEADLINE_SECONDS = 7200.0
"""For an output without a deadline: 32,768 tokens at five a second, waiting included."""

OTHERS_WAIT_SECONDS = 30.0
"""For another request that is sending the same picture to the same worker: 48 MiB over a slow link."""
