"""How long things may take in this package, and why."""

from __future__ import annotations

# ranks.py

RANK_CALL_SECONDS = 30.0
"""A call waits for the step under way."""

MIN_MAPPING_SECONDS = 10.0

TALLY_POLL_SECONDS = 0.005

STOP_POLL_SECONDS = 0.2
"""How often a call that waits looks whether the engine was stopped."""


# staging_budget.py

FREEING_WAIT_SECONDS = 10.0
"""How long memory that is being freed is waited for before more is taken."""
