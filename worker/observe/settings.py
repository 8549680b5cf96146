"""How long things may take in this package, and why."""

from __future__ import annotations

# processes.py

EXIT_POLL_SECONDS = 0.02

STANDSTILL_SECONDS = 3.0
"""How long a process must have been stopped to be missed: a debugger stops it for a moment, too."""
