"""How long things may take in this package, and why."""

from __future__ import annotations

# control_verbs.py

QUICK_CALL_SECONDS = 5.0

TRANSITION_SLACK_SECONDS = 660.0
"""How long a transition may take beyond its drain, to abort requests and move weights."""


# governor.py

ENGINE_PAUSE_SECONDS = 120.0

MEMORY_CALL_SECONDS = 600.0
"""Longest time to release or restore memory, weights included."""

TRANSITION_RETRY_SECONDS = 5.0


# supervisor.py

BACKOFF_RESET_SECONDS = 600.0
"""An engine that lives this long resets the back-off."""

WATCH_INTERVAL_SECONDS = 0.5

ENGINE_STOP_SECONDS = 30.0

STAGED_RELEASE_SECONDS = 1.0
"""How long the processes of an engine that is to end get to let go of staged bytes before it does."""

HEARTBEAT_SLACK_SECONDS = 30.0

RELOAD_WEIGHTS_SECONDS = 1800.0

ENGINE_CALL_SECONDS = 600.0
