"""How long things may take in this package, and why."""

from __future__ import annotations

# balancer.py

PACE_MEMORY_SECONDS = 60.0
"""After so long without a measurement a member counts as fast as usual, so that it is tried again."""


# health_checker.py

HEALTH_TICK_SECONDS = 0.1

PROBE_TIMEOUT_SECONDS = 5.0

FIRST_PROBE_SECONDS = 0.2

MAX_PROBE_SECONDS = 3.0

WEIGHTS_PROBE_SECONDS = 0.5
"""Between two looks at the weights of a member that are too old for somebody who waits."""

SILENCE_LIMIT_SECONDS = 20.0

GONE_LIMIT_SECONDS = 10.0
"""How long an attempt on a member that discovery lost may be silent: a dead node sends no reset."""


# member_clients.py

CONNECT_TIMEOUT_SECONDS = 5.0

WRITE_TIMEOUT_SECONDS = 60.0

KEEP_ALIVE_SECONDS = 60.0
"""Less than the 75 s for which a worker keeps an idle connection."""


# router.py

WAIT_WARNING_SECONDS = 10.0
"""How often the log says why requests wait for a replica."""

WAIT_POLL_SECONDS = 0.5
"""A waiting request looks again at least this often: some exclusions end by time alone."""
