"""How long things may take in this package, and why."""

from __future__ import annotations

# network.py

RESOLVE_RETRY_SECONDS = 1.0
