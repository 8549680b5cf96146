"""How long things may take in this package, and why."""

from __future__ import annotations

# worker_host.py

HOST_CLOSE_SECONDS = 120.0
"""What the end of a worker takes at most, beyond its drain: its parts have deadlines of their own."""
