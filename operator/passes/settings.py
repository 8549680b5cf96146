"""How long things may take in this package, and why."""

from __future__ import annotations

# pass_input.py

FIRST_POLLS_SECONDS = 5.0
"""How long the first answers of a pool's heads may take: a poll's deadline, and its turn."""


# pass_loop.py

PASS_DEADLINE_SECONDS = 300.0
"""Every wait in a pass has a deadline; this one bounds their sum, for thousands of new pods."""

FENCED_RETRY_SECONDS = 1.0


# plan_actions.py

STATUS_PROGRESS_SECONDS = 1.0
"""Least time between two writes of status that only report progress."""


# write_obstacles.py

REFUSED_RETRY_SECONDS = 10.0
"""How soon a refused write is tried again, and a name that is taken; doubled after each refusal."""

BUSY_RETRY_SECONDS = 1.0
"""The same, where the API server could not answer or asked to come later."""

MAX_BUSY_RETRY_SECONDS = 30.0
"""Longest time until what the API server could not take is tried again."""

MAX_RETRY_SECONDS = 300.0

MIN_RETRY_SECONDS = 0.2
