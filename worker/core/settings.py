"""How long things may take in this package, and why."""

from __future__ import annotations

# device_turn.py

TURN_POLL_SECONDS = 1.0
"""How often whoever waits looks whether it should still, besides whenever something changes."""


# multi_node_turn.py

MEMBERS_POLL_SECONDS = 0.2


# multi_node_turn.py

PATIENCE_SECONDS = 5.0
"""How long somebody else's lock is waited for while locks of other nodes are held."""

PAUSE_SECONDS = 1.0
"""The longest pause between two attempts; its length is drawn, so that two gangs do not stay in step."""

USE_SECONDS = 5.0
"""How long a member may not answer when it is told that the turn is used."""


# worker_runtime.py

CANCEL_GRACE_SECONDS = 5.0
