"""How long things may take in this package, and why."""

from __future__ import annotations

# body_routes.py

BODY_TIMEOUT_SECONDS = 60.0
"""What a body may take to arrive."""


# in_flight_requests.py

ANSWER_TIMEOUT_SECONDS = 90.0
"""How long a request may outlive its own deadline before the worker gives up on it."""

ABORT_TIMEOUT_SECONDS = 30.0
"""How long the engine may take to end an aborted request; then the worker ends it itself."""
