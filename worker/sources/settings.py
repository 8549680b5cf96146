"""Numbers of this package, each with its reason; durations are in seconds."""

from __future__ import annotations

import os

HASHING_THREADS = min(4, os.cpu_count() or 1)
"""Most threads that read and hash one version. One thread that copies and hashes reaches two thirds of the memory's
bandwidth, so a few are enough; more would take processors from requests."""

RESUME_SECONDS = 10.0
"""How long a transfer waits for a lost sender to return with the same ticket: a trainer that only lost its connection
is back within a second, and a dead one must not keep a slot."""

TAKEOVER_SECONDS = 2.5
"""Silence after which a second connection with the same ticket replaces the first: two pings were due in that time."""

FORMER_STREAM_SECONDS = 10.0
"""How long the task of a former connection gets to end: it may be writing a large piece."""

FOLLOW_LOOK_SECONDS = 0.2
"""How often a thread or task that waits for bytes checks whether its work was cancelled, or the sender is gone."""

PROGRESS_SECONDS = 0.1
"""How often a sender gets the progress: often enough for a progress bar, and a frame costs less than a piece."""

LEAVE_SECONDS = 2.0
"""How long the other end gets to read the last frame before the connection is closed."""

PEER_RETRY_SECONDS = 0.5
"""After how long to dial a peer again whose connection broke: that worker may be receiving the same version."""

OFFER_SECONDS = 120.0
"""How long the ticket of an offer is valid: the peer has not received it yet."""

KEEP_WAIT_SECONDS = 600.0
"""How long a worker waits for others of its node to write into the folder of kept versions: as long as a stage may take."""

KEEP_LOOK_SECONDS = 0.5
"""How often it looks whether they are done."""
