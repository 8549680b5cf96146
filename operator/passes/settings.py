"""How long things may take in this package, and why."""

from __future__ import annotations

FIRST_POLLS_SECONDS = 5.0
"""How long the first answers of a pool's heads may take once no head of any pool gives its first one: a poll's deadline,
and its wait for a slot. A new process may have thousands of heads to ask, which takes as long as it takes."""

PASS_DEADLINE_SECONDS = 300.0
"""Every wait in a pass has a deadline; this one bounds their sum, for thousands of new pods."""

ABSENT_RETRY_SECONDS = 10.0
"""How soon a pool is looked at again that the API server did not find: mostly the watch shows before that it is
gone. But an API server that has just started may not know the resource yet, and no event follows."""

FENCED_RETRY_SECONDS = 1.0
"""How soon a pass is tried again without the Lease: its renewal takes about that long to succeed."""

STATUS_PROGRESS_SECONDS = 1.0
"""Least time between two writes of status that only report progress: people read no faster."""

MAX_STATUS_PROGRESS_SECONDS = 300.0
"""The same while hundreds of pools move: what a person may read of one of them is at most five minutes old, and such a start
writes it once more. After a minute, 1,000 pools wrote it three times more, a tenth of all their writes."""

PROGRESS_LOOK_SECONDS = 60.0
"""How soon a pool whose progress waits to be written is looked at again: by then few others may move."""

REFUSED_RETRY_SECONDS = 10.0
"""How soon a refused write is tried again, and a name that is taken; doubled after each refusal. A
person has to act first, and that takes longer than any shorter time."""

BUSY_RETRY_SECONDS = 1.0
"""The same where the API server could not answer or asked to come later: it may recover by itself."""

MAX_BUSY_RETRY_SECONDS = 30.0
"""Longest time until what the API server could not take is tried again: so soon an outage is over."""

MAX_RETRY_SECONDS = 300.0
"""Longest time until a refused write is tried again: after a fix the pool recovers without a user's
wish for it."""

MIN_RETRY_SECONDS = 0.2
"""Shortest time between two passes over a pool that waits for a write: no busy loop."""
