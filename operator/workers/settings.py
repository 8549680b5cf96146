"""How long things may take in this package, and why."""

from __future__ import annotations

# head_poller.py

POLL_SLOT_SECONDS = 0.1
"""How long a poll keeps the next one waiting. Healthy workers answer sooner, and at three times `MAX_POLLS_PER_SECOND`
(of each pace) polls that get no answer at all take 60 places."""

FAST_POLL_SECONDS = 0.5

SLOW_POLL_SECONDS = 5.0

FIRST_POLL_BACKOFF_SECONDS = 0.5

MAX_POLL_BACKOFF_SECONDS = 5.0

STARTING_POLL_BACKOFF_SECONDS = 1.0

STALE_STATE_SECONDS = 15.0

POLL_TIMEOUT_SECONDS = 3.0

EARLY_POLL_SECONDS = 0.02
"""A poll that is due so soon may as well be now."""


# worker_calls.py

CALL_BACKOFF_BASE_SECONDS = 1.0

CALL_BACKOFF_MAX_SECONDS = 30.0

CALL_CANCEL_SECONDS = 2.0


# worker_clients.py

STAGE_POLL_SECONDS = 0.1

STALE_FAILURE_SECONDS = 60.0
"""A failed call that is due again for so long is not wanted any more, say sleep in a pool that has been
woken meanwhile. Failures about weights are kept: they tell of the weights."""


# worker_connections.py

KEEPALIVE_IDLE_SECONDS = 60.0
"""Above the slowest usual polling interval, below the 75 s that a worker keeps a connection."""

CONNECT_TIMEOUT_SECONDS = 5.0
