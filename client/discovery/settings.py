"""How long things may take in this package, and why."""

from __future__ import annotations

# dns.py

RESOLVE_INTERVAL_SECONDS = 5.0
"""How long an answer is good for: the TTL that cluster DNS gives to Services."""

RESOLVE_TIMEOUT_SECONDS = 5.0
