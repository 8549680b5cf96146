"""Durations of a pool on this machine, in seconds, each with its reason."""

from __future__ import annotations

LOOK_SECONDS = 0.5
"""How often workers are looked at: nobody sees a shorter delay on a terminal."""

ANSWER_SECONDS = 5.0
"""How long a worker may take to answer. It answers while its model loads, but importing torch keeps it busy."""

STOP_SECONDS = 15.0
"""How long workers may take to stop. They abort what runs after `DRAIN_SECONDS`; then an engine frees its memory."""

DRAIN_SECONDS = 2.0
"""How long running requests may go on once the workers begin to stop: a person waits for it."""
