"""How long things may take in this package, and why."""

from __future__ import annotations

DEFAULT_PUBLISH_SECONDS = 600.0
"""Workers read a large checkpoint from a network volume in minutes."""

MAX_PUBLISH_SECONDS = 86400.0
"""Workers refuse a stage with a longer deadline: its memory would stay taken for longer than a day."""

DEFAULT_STATE_SECONDS = 600.0
"""A sleep may drain running requests; a wake may load a large model again."""

DEFAULT_ACQUIRE_SECONDS = 30.0
"""An epoch is one small write, so what takes longer is a failure of the API server or the workers."""

STATUS_POLL_SECONDS = 0.2
"""How often a change of state looks at the RolloutReplica: a wake is felt by the trainer at once."""

RETRY_SECONDS = 0.02
"""The pause after a write that conflicted: the operator writes often, and one more read settles it."""

QUICK_SECONDS = 10.0
"""How long one read of the object is retried while the API server fails."""

STRAGGLER_SECONDS = 60.0
"""How long a wake waits for the last replicas once one serves: the operator replaces broken ones."""

SLOW_HEAD_SECONDS = 30.0
"""How long a head that answers too late is asked again. If one that serves were left out, the update
would wait for its bytes in vain; one that is stuck leaves the Service after half of that."""

BUSY_RETRY_SECONDS = 20.0
"""How long an overloaded control port, or a proxy before it, is asked again."""

ASK_AGAIN_SECONDS = 0.5
"""The pause before that: a busy port is not helped by more calls."""

RETRY_INTERVAL_SECONDS = 0.5
"""How often an order that a replica can't obey yet is repeated; loads and drains take seconds."""

STATE_ASK_SECONDS = 3.0
"""How long a caller that only asks for a state waits for it."""

PROGRESS_INTERVAL_SECONDS = 1.0
"""How long a worker has to take note of a wake that nobody waits for."""

KEEP_INTERVAL_SECONDS = 1.0
"""How often the keeper looks at all replicas; one that returns serves nothing until then."""

MAX_LOOKS_PER_SECOND = 200
"""How many replicas the keeper looks at in a second at most, which takes a seventh of a core; large pools wait longer."""

SEED_TIMEOUT_SECONDS = 600.0
"""How long one replica may take to stage the pool's weights: as long as a publish."""

POLL_SECONDS = 0.1
"""How often replicas are asked while they stage; small models take less than a second."""

MAX_POLLS_PER_SECOND = 500
"""How many replicas are asked in a second at most while they stage, which takes a third of a core."""

MEMBERS_POLL_SECONDS = 1.0
"""How often replicas are asked whose connection for pushed bytes has been silent."""

DEAD_SECONDS = 5.0
"""A replica that does not answer for this long while it stages leaves the barrier."""
