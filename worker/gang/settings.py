"""How long things may take in this package, and why."""

from __future__ import annotations

# gang_head.py

MEMBER_POLL_SECONDS = 1.0

MEMBER_SILENCE_SECONDS = 7.0
"""Silence after which a member counts as dead: with what a look takes, less than 10 s."""

MEMBER_START_SECONDS = 60.0
"""The same while engines load, which may keep a worker from answering for a while."""

SLOT_POLL_SECONDS = 0.2

SLOT_CLOSE_SECONDS = 5.0


# member_client.py

MEMBER_ANSWER_SECONDS = 3.0
"""What a member gets to answer: from memory, so it is the network's time."""

TOKEN_READ_SECONDS = 1.0


# member_slots.py

SOURCE_LOOKUP_SECONDS = 10.0


# member_trust.py

CERTIFICATE_CHECK_SECONDS = 1.0
"""What a look at the files may take."""


# member_turn.py

SILENCE_SECONDS = 8.0
"""Silence of the head after which a turn that isn't used is given back."""

WAIT_SECONDS = 1.0
"""How long an answer waits for the turn."""


# member_worker.py

GANG_WATCH_SECONDS = 0.5

HEAD_SILENCE_SECONDS = 8.0
"""Silence after which the head counts as dead; with what else it takes, this node ends within 10 s."""

HEAD_LEAVE_SECONDS = 3.0
"""The same once this member was told to end: it stays while its head drains."""

HEAD_START_SECONDS = 60.0
"""The same while either of the two still loads."""

FAILURE_REPORT_SECONDS = 3.0
"""How long a member that gives up stays, so that its head hears why."""

SLOTS_CLOSE_SECONDS = 5.0
"""What giving the slots back may take at the end; the ranks end after it."""

RANKS_STOP_SECONDS = 30.0


# silence_timer.py

MAX_GAP_SECONDS = 4.5
"""What counts at most between two looks: while this process stood still it could hear nobody."""
