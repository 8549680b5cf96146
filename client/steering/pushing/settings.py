"""Durations of a push on the trainer's side, in seconds, each with its reason."""

from __future__ import annotations

DIAL_SECONDS = 5.0
"""How long a connection to a replica may take: its port listens before it is Ready, so longer means a broken network."""

RECONNECT_SECONDS = 0.2
"""After how long to connect again to a replica whose connection broke: it keeps what came for the same ticket."""

FILLING_LOOK_SECONDS = 0.5
"""How often a wait for bytes of other nodes checks whether they fail to come: it holds one thread of the loop's pool."""

MERGING_LOOK_SECONDS = 0.5
"""How often rank 0 checks whether another rank has failed while it waits for the last bytes."""

CALL_SECONDS = 3.0
"""How long a connection to an address of rank 0 may take, and then the first frame: callers try several addresses."""

ACCEPT_RETRY_SECONDS = 0.1
"""After how long rank 0 accepts callers again, when it had too many open files."""

GRACE_SECONDS = 30.0
"""How long after the deadline of a publish rank 0 may report the outcome, since it waits until that deadline itself."""

MEMBER_LOOK_SECONDS = 1.0
"""How often a rank that waits for rank 0 checks the deadline: rank 0 pings as often."""

RANK_LOOK_SECONDS = 0.05
"""How long rank 0 polls one rank before the next one, while it waits for all."""

LEAD_SECONDS = 1.0
"""How much longer rank 0 waits for the lead of another node, which waits as long for its own ranks and names the late one."""

DEATH_SECONDS = 2.0
"""How long to wait for a connection to show a dead rank, after a collective operation has failed: a socket shows it
within a second."""

ACK_SECONDS = 10.0
"""How long a rank may take to stop writing once it has the outcome: it may be in the middle of a large tensor."""
