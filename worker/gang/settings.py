"""Durations of gangs, in seconds, each with its reason.

The head counts a dead member out within 10 s, and a member its dead head.
"""

from __future__ import annotations

# The head's watch.

MEMBER_POLL_SECONDS = 1.0

MEMBER_SILENCE_SECONDS = 7.0
"""Silence after which a member counts as dead: with one poll and one answer still less than 10 s."""

MEMBER_START_SECONDS = 60.0
"""The same while engines load, which may keep a worker from answering."""

MEMBER_ANSWER_SECONDS = 3.0
"""A member answers from memory, so this is for the network."""

MAX_GAP_SECONDS = 4.5
"""The most that one interval adds to a silence: while this process stood still it could hear nobody."""

TOKEN_READ_SECONDS = 1.0
"""The kubelet keeps tokens in memory, so a longer read hangs."""

CERTIFICATE_CHECK_SECONDS = 1.0
"""As for a token; the files of before stay valid meantime."""

# Slots.

SLOT_POLL_SECONDS = 0.2
"""What a poll adds to a stage of many seconds."""

SLOT_CLOSE_SECONDS = 5.0
"""A member that does not answer must not hold up the head; the watch repeats the call."""

SLOTS_CLOSE_SECONDS = 5.0
"""At the end of a member; its ranks, which read the slots, are stopped after it."""

SOURCE_LOOKUP_SECONDS = 10.0
"""A path on a network volume may take seconds to resolve."""

# The member's watch.

GANG_WATCH_SECONDS = 0.5

HEAD_SILENCE_SECONDS = 8.0
"""Silence after which the head counts as dead; with the rest this node ends within 10 s."""

HEAD_LEAVE_SECONDS = 3.0
"""The same once this member must end: it stays only while its head drains."""

HEAD_START_SECONDS = 60.0
"""The same while either of the two still loads."""

FAILURE_REPORT_SECONDS = 3.0
"""How long a member that gives up stays, so that three polls of its head can read the reason."""

RANKS_STOP_SECONDS = 30.0
"""Ranks free gigabytes of device memory; after it they die with the process."""

# The turn.

WAIT_SECONDS = 1.0
"""How long an answer waits for the turn; below `MEMBER_ANSWER_SECONDS`."""

SILENCE_SECONDS = 8.0
"""Silence of the head after which an unused turn is given back: as long as the head may be silent."""

MEMBERS_POLL_SECONDS = 0.2
"""Between two calls of a member that does not answer."""

PATIENCE_SECONDS = 5.0
"""The wait for a lock while locks of other nodes are held: two holders that wait for each other lose no more."""

PAUSE_SECONDS = 1.0
"""The longest pause between two attempts; its length is drawn, so that two gangs do not stay in step."""

USE_SECONDS = 5.0
"""How long a member that took its turn may not answer before the attempt counts as failed."""
