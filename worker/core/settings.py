"""Durations of this package, in seconds."""

from __future__ import annotations

CANCEL_GRACE_SECONDS = 5.0
"""What a cancelled call gets to clean up; an engine that hangs would never end it."""

STATE_LOOK_SECONDS = 0.5
"""How often a caller's wait for another state looks, where nothing says that it has changed."""

STATE_PACE_SECONDS = 0.02
"""How soon it looks after a change: the end of each request may be one, a thousand times a second."""
