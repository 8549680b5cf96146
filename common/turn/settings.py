"""Durations of this package, in seconds, each with its reason."""

from __future__ import annotations

HOLDER_POLL_SECONDS = 0.1
"""How often a waiter reads the holder's name and checks that the turn is still wanted.

A verb that ends the wait answers that much later; ten reads of a small file per second cost nothing.
"""

OPEN_GRACE_SECONDS = 5.0
"""Extra time to open the files of a free turn, so that a slow disk isn't reported as a holder."""

QUEUE_COURTESY_SECONDS = 1.0
"""The longest time that a stopped process at the head of the queue delays the others."""

QUEUE_POLL_SECONDS = 0.001
"""Short, because the head of the queue usually leaves it within microseconds."""

JOIN_TIMEOUT_SECONDS = 30.0
"""The parent answers from memory; a machine that swaps may still take long."""

NVIDIA_SMI_SECONDS = 10.0
"""nvidia-smi takes about a second when persistence mode is off."""

KILL_SECONDS = 1.0
"""How long to wait for the end of a killed nvidia-smi: one that waits for the driver does not end, and a child of it
may hold its output open."""

MEMORY_RETURN_SECONDS = 30.0
"""How long the driver may take to return the memory of the holder before."""

MEMORY_POLL_SECONDS = 0.2

MEMORY_QUIET_SECONDS = 2.0
"""If nobody knows how much memory returns: all has returned once nothing came for this long.

A driver may begin late, so two polls without growth prove nothing.
"""
