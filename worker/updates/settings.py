"""Durations of this package, in seconds, each with its reason."""

from __future__ import annotations

DISCARD_TIMEOUT_SECONDS = 60.0
"""A thread that reads a volume can't be interrupted; its memory is freed when it ends."""

LOCK_SLACK_SECONDS = 60.0
"""How long a commit waits, beyond its deadline, for another verb to end."""

ENGINE_PAUSE_SECONDS = 120.0
"""The step under way ends first: a long prefill on a slow machine."""

MEMBERS_CONFIRM_SECONDS = 60.0
"""Members answer from memory; before this limit the gang's watch finds a dead one."""

ENGINE_COMMIT_SECONDS = 600.0
"""Most engines swap pointers, but some copy all weights to the device."""

DRAIN_POLL_SECONDS = 0.05
"""How old the engine's counts may be while requests drain."""

REFILL_TIMEOUT_SECONDS = 1800.0
"""What the other nodes of a gang get to load the active weights again, from a network volume."""

DTYPE_LOOKUP_SECONDS = 1.0
"""The least time to look up a path, however short the deadline: the slot then reports that it passed."""
