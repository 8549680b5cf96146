"""How long things may take in this package, and why."""

from __future__ import annotations

# attempt_verdicts.py

FIRST_PAUSE_SECONDS = 0.05

MAX_PAUSE_SECONDS = 2.0

DEFAULT_RETRY_SECONDS = 1.0
"""When to ask a replica again that is busy and does not say until when."""


# attempts.py

ANSWER_GRACE_SECONDS = 2.0
"""What a worker gets beyond the deadline to say that it is over."""


# continuation.py

MAX_DEADLINE_SECONDS = 86400.0
"""Seconds that a worker takes for a request at most."""


# generate_options.py

DEFAULT_DEADLINE_SECONDS = 7200.0
"""For an output unless said otherwise: 32,768 tokens at five a second, waiting included."""
