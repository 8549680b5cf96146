"""Durations of this package, in seconds, each with its reason."""

from __future__ import annotations

# Verbs.

QUICK_CALL_SECONDS = 5.0
"""How long a verb waits for an engine to begin to load, before it answers that it loads."""

TRANSITION_SLACK_SECONDS = 660.0
"""How long a transition may take beyond its drain: one `MEMORY_CALL_SECONDS`, and aborts."""

# Calls to the engine.

ENGINE_PAUSE_SECONDS = 120.0
"""The step under way ends first: a long prefill on a slow machine."""

MEMORY_CALL_SECONDS = 600.0
"""To release or restore memory; weights may come from a slow disk."""

ENGINE_CALL_SECONDS = 600.0
"""For the calls that make reloaded weights serve."""

RELOAD_WEIGHTS_SECONDS = 1800.0
"""A restarted engine may read its weights from a network volume, together with all others."""

ENGINE_STOP_SECONDS = 30.0
"""An engine that has not stopped by then hangs, and the worker goes on without it."""

STAGED_RELEASE_SECONDS = 1.0
"""How long an engine's processes get to let go of staged bytes before it stops: a stopped process never answers."""

# Watching.

TRANSITION_RETRY_SECONDS = 5.0
"""Between two tries of a transition that the engine refused."""

BACKOFF_RESET_SECONDS = 600.0
"""An engine that lives this long resets the back-off."""

WATCH_INTERVAL_SECONDS = 0.5
"""How late a death may be seen that no process reported."""

HEARTBEAT_SLACK_SECONDS = 30.0
"""How late the supervisor may be before `/health` fails: a machine that swaps is slow, not stuck."""
