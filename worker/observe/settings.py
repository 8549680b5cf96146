"""Durations of this package in seconds, each with its reason."""

from __future__ import annotations

EXIT_POLL_SECONDS = 0.02
"""Between two looks at killed processes, which end within milliseconds."""

STANDSTILL_SECONDS = 3.0
"""A process that was stopped for so long counts as hung: a debugger or a checkpoint stops it for less."""
