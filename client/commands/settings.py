"""How long things may take in this package, in seconds, and why."""

from __future__ import annotations

POLL_SECONDS = 1.0
"""How often `wait` and `status --watch` look: people notice no less, and the API server no more."""

DEFAULT_WAIT_SECONDS = 600.0
"""A large model loads for minutes."""

GENERATE_SECONDS = 300.0
"""A long answer on a busy pool."""

PROBE_SECONDS = 5.0
"""A worker answers from memory; one that does not answer by then is reported."""

LEASE_SECONDS = 60.0
"""The leader renews its Lease every few seconds, and a standby takes over after 15: a Lease four times as
old as that has no leader."""

SPEC_SECONDS = 60.0
"""The operator looks at a changed spec within a second; a new leader may need half a minute."""

WARNING_SECONDS = 900.0
"""How old a warning may be that `why` still shows: the operator repeats one after ten minutes."""
