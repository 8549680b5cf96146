"""How long things may take in this package, and why."""

from __future__ import annotations

# operator_logs.py

REPEATED_LOG_SECONDS = 60.0


# operator_process.py

ELECTION_SILENCE_SECONDS = 60.0
"""The election's every step has a deadline, so a minute of silence means that it is stuck."""

MAX_QUEUE_AGE_SECONDS = 60.0

PASSES_DRAIN_SECONDS = 8.0
"""Time that running passes get at the end; the whole shutdown stays below 25 s."""

STREAMS_STOP_SECONDS = 4.0

FENCE_TICK_SECONDS = 0.25


# probe_server.py

MAX_LAG_SECONDS = 5.0

LAG_PERIOD_SECONDS = 0.5

LAG_WINDOW_SECONDS = 30.0
