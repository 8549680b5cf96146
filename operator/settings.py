"""How long things may take in the process itself, in seconds, and why."""

from __future__ import annotations

REPEATED_LOG_SECONDS = 60.0
"""kopf warns at each retry: one line a minute shows that an outage lasts."""

ELECTION_SILENCE_SECONDS = 60.0
"""The election's every step has a deadline, so a minute of silence means that it is stuck."""

MAX_QUEUE_AGE_SECONDS = 60.0
"""Passes take milliseconds: a pool that waits a minute shows that they don't get on."""

PASSES_DRAIN_SECONDS = 8.0
"""Time that running passes get at the end; the whole shutdown stays below 25 s."""

STREAMS_STOP_SECONDS = 4.0
"""kopf cancels its own tasks within two seconds; it is cancelled after twice that."""

FENCE_TICK_SECONDS = 0.25
"""Calls end this long after the permission to act, at most: well within the 5 s until a standby begins."""

MAX_LAG_SECONDS = 5.0
"""A loop that is blocked longer can't keep the Lease, which must be renewed within 10 s."""

LAG_PERIOD_SECONDS = 0.5
"""Ten measurements in `MAX_LAG_SECONDS`, at no cost worth naming."""

LAG_WINDOW_SECONDS = 30.0
"""A probe every 10 s sees each lag several times, so that one lost probe hides none."""

FREEZE_SECONDS = 2.0
"""So often that little is new each time: what is new is collected in one go, 0.6 µs an object."""

FREEZES_PER_THAW = 300
"""Every ten minutes the whole heap is collected, if it has grown."""

SWITCH_SECONDS = 0.001
"""How long the thread that plans for a large pool keeps the event loop waiting after each of its system calls: by
default five times as long, and an iteration of the loop may have a hundred."""

MAX_SHARDS = 16
"""Leases that the operator's Role names: one core's worth of passes each."""
