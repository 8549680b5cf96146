"""How long things may take in this package, in seconds, and why."""

from __future__ import annotations

DISCOVERY_WAIT_SECONDS = 10.0
"""How long steering waits for the first members: enough for a list by a busy API server."""

PART_RESTART_SECONDS = 1.0
"""Pause before a failed part of the pool starts again: short, as requests need it, but not a busy loop."""

INFO_TIMEOUT_SECONDS = 5.0
"""How long one replica may take to describe itself before another one is asked."""

SERVING_LOOK_SECONDS = 0.05
"""How often a caller that waits for members looks by itself: discovery and an excluded member's time pass without a word."""
