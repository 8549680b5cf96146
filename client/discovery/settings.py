"""How long things may take in this package, in seconds, and why."""

from __future__ import annotations

RESOLVE_INTERVAL_SECONDS = 5.0
"""How long an answer is good for: the TTL that cluster DNS gives to Services."""

RESOLVE_TIMEOUT_SECONDS = 5.0
"""As a resolver waits for one server; a slower answer would be older than its TTL."""
