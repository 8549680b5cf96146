"""How long things may take in this package, and why."""

from __future__ import annotations

# credentials.py

TOKEN_REREAD_SECONDS = 600
"""How long a token that was read from the file is used; the kubelet renews it with hours to go."""


# event_recorder.py

EVENT_REPEAT_SECONDS = 600.0

EVENT_FLUSH_SECONDS = 2.0


# installed_schema.py

SCHEMA_CHECK_SECONDS = 300.0

SCHEMA_RETRY_SECONDS = 10.0
"""How soon to look again while something is lacking, or could not be read."""


# lease.py

LEASE_DURATION_SECONDS = 15

RENEW_DEADLINE_SECONDS = 10.0

RENEW_INTERVAL_SECONDS = 2.0

STANDBY_POLL_SECONDS = 1.0
"""A standby looks this often, so that it takes over within 2 s of a release."""

LEASE_REQUEST_SECONDS = 5.0
"""Deadline of one request for the Lease."""


# transport.py

REQUEST_TIMEOUT_SECONDS = 30.0

STREAM_SLACK_SECONDS = 10.0
"""How much longer than it was asked for a stream may last: the API server ends it, if it lives."""

CONNECT_TIMEOUT_SECONDS = 5.0
