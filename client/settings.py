"""How long things may take in this package, and why."""

from __future__ import annotations

# blocking_portal.py

CLOSE_SECONDS = 30.0

CHECK_SECONDS = 1.0
"""How often a waiting thread checks that the loop's thread is still there."""


# worker_control.py

STATE_TIMEOUT_SECONDS = 3.0

QUICK_CALL_SECONDS = 10.0
"""For verbs that only take note of something."""

DEADLINE_SLACK_SECONDS = 120.0
"""How long a verb may take beyond its own deadline: moving a model's memory, loading it again."""
