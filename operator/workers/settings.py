"""How long things may take in this package, in seconds, and why."""

from __future__ import annotations

# Polls.

POLL_SLOT_SECONDS = 0.1
"""How long a poll keeps the next one waiting. Healthy workers answer sooner, and at three times `MAX_POLLS_PER_SECOND`
(of each pace) polls that get no answer at all take 60 places."""

FAST_POLL_SECONDS = 0.5
"""While something is under way: a commit takes about as long, and each step waits for a poll."""

SLOW_POLL_SECONDS = 5.0
"""Otherwise: a third of `STALE_STATE_SECONDS`, so that two missed polls make no state stale."""

POLL_TICK_SECONDS = 0.1
"""Slow polls that are due within it go out at once: each waking of an idle process costs as much as the poll
(measured: 508 µs a poll one by one, 320 µs together)."""

FIRST_POLL_BACKOFF_SECONDS = 0.5
"""After the first failure, which is mostly one lost connection."""

MAX_POLL_BACKOFF_SECONDS = 5.0
"""As slow polls: a worker that comes back is noticed as soon as any other change."""

STARTING_POLL_BACKOFF_SECONDS = 1.0
"""For a head that has never answered: somebody waits for it to be Ready."""

STALE_STATE_SECONDS = 15.0
"""An answer this old is not believed: requests may have moved the worker on, or it may be gone."""

POLL_TIMEOUT_SECONDS = 3.0
"""A worker answers from memory; three seconds leave room for a busy event loop."""

EARLY_POLL_SECONDS = 0.02
"""A poll that is due this soon may as well be now."""

# Calls.

CALL_BACKOFF_BASE_SECONDS = 1.0
"""After the first failure: most pass within a second, such as a restart of the port."""

CALL_BACKOFF_MAX_SECONDS = 30.0
"""A worker that was repaired takes part again within half a minute."""

CALL_CANCEL_SECONDS = 2.0
"""Cancelled calls only close their sockets; a fenced process must not wait longer for them."""

STAGE_LOOK_SECONDS = 0.1
"""After so long a call that stages looks first, then after twice as long, and so on: small weights take tenths of
a second. From `FAST_POLL_SECONDS` on it waits for the polls: ten looks a second of 400 workers would take a whole core."""

STALE_FAILURE_SECONDS = 60.0
"""A failed call that has been due again for this long is no longer wanted, such as sleep in a pool that was
woken since. Failures about weights are kept: they describe the weights."""

# Connections.

KEEPALIVE_IDLE_SECONDS = 60.0
"""Above the slowest usual polling interval, below the 75 s that a worker keeps a connection."""

CONNECT_TIMEOUT_SECONDS = 5.0
"""A handshake takes milliseconds; five seconds leave room for two lost packets."""
