"""Durations of this package in seconds, each with its reason."""

from __future__ import annotations

HOST_CLOSE_SECONDS = 120.0
"""For a worker to end, in addition to its drain: longer than its parts need, which have deadlines of their own."""
