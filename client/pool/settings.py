"""How long things may take in this package, and why."""

from __future__ import annotations

# asynchronous.py

DISCOVERY_WAIT_SECONDS = 10.0
"""How long steering waits for discovery to find the first members."""


# background.py

PART_RESTART_SECONDS = 1.0
"""How long after a part failed, by a defect or in a hook, it begins anew."""


# presence.py

INFO_TIMEOUT_SECONDS = 5.0
"""How long one replica may take to say what it is."""
