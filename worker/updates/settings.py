"""How long things may take in this package, and why."""

from __future__ import annotations

# staging_slot.py

DISCARD_TIMEOUT_SECONDS = 60.0


# weight_commits.py

LOCK_SLACK_SECONDS = 60.0

ENGINE_PAUSE_SECONDS = 120.0
"""Longest wait for a step to end: a long prefill on a slow machine."""

MEMBERS_CONFIRM_SECONDS = 60.0

ENGINE_COMMIT_SECONDS = 600.0

DRAIN_POLL_SECONDS = 0.05
"""How stale the engine's counts may be seen while requests drain."""


# weight_updates.py

REFILL_TIMEOUT_SECONDS = 1800.0
"""What the other nodes of a gang get to bring the active weights again."""

DTYPE_LOOKUP_SECONDS = 1.0
"""What looking up a path is given at least."""
