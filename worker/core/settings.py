"""Durations of this package, in seconds."""

from __future__ import annotations

CANCEL_GRACE_SECONDS = 5.0
"""What a cancelled call gets to clean up; an engine that hangs would never end it."""
