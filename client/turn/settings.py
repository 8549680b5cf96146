"""How long things may take in this package, and why."""

from __future__ import annotations

# command.py

UNLIMITED_SECONDS = 10 * 365 * 86400.0


# session.py

UNDO_TIMEOUT_SECONDS = 10.0
"""How long a turn that failed tries to ask the pool back before it says that it could not."""

TURN_RETRY_SECONDS = 0.5


# turn_devices.py

DEVICE_LOOKUP_SECONDS = 10.0
"""How long each look is tried while the API server fails."""
