"""How long things may take in this package, and why."""

from __future__ import annotations

# lock_queue.py

QUEUE_POLL_SECONDS = 0.001


# looks.py

HOLDER_POLL_SECONDS = 1.0


# device_memory.py

ASK_SECONDS = 10.0

BACK_SECONDS = 30.0
"""How long memory may take to come back from who had the turn before."""

EVERY_SECONDS = 0.2

QUIET_SECONDS = 2.0
"""Where nobody knows how much is to come: so long nothing more must come before it counts as all. A driver may begin late."""


# lock_queue.py

COURTESY_SECONDS = 1.0
"""So long who wants the lock lets somebody else stand in its door."""


# looks.py

# Who waits is told of it at once, then looks at each second whether another one holds the turn.
FIRST_POLL_SECONDS = 0.05

# So much longer than asked for may opening the files of a free turn last before it counts as not had.
OPEN_GRACE_SECONDS = 5.0


# sharing.py

JOIN_TIMEOUT_SECONDS = 30.0
