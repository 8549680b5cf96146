"""How long things may take in this package, in seconds, and why."""

from __future__ import annotations

PACE_MEMORY_SECONDS = 60.0
"""Without a measurement for this long a member counts as fast, so that it is tried again."""

PACE_COMPARE_SECONDS = 1.0
"""How often the paces of many members are compared: an answer takes seconds, and they don't change faster."""

HEALTH_TICK_SECONDS = 0.1
"""How often members are checked: a probe is at most this late, and a tick costs microseconds."""

PROBE_TIMEOUT_SECONDS = 5.0
"""A worker answers probes next to running requests: one that is slower can not serve either."""

FIRST_PROBE_SECONDS = 0.2
"""Pause after the first failed probe: a restarted connection or a short pause is over by then."""

MAX_PROBE_SECONDS = 3.0
"""The pause doubles up to this: a replica that is back gets requests within three seconds."""

WEIGHTS_PROBE_SECONDS = 0.5
"""Between two looks at the weights of a member that are too old for a waiting request."""

PASSED_OVER_SECONDS = 2.0
"""The same where no request waits, since others take them."""

PASSED_OVER_PER_TICK = 5
"""Most such looks at once: after a publish a thousand members may be passed over."""

SILENCE_LIMIT_SECONDS = 20.0
"""A worker sends tokens far more often, unless the request is queued: then it is asked."""

GONE_LIMIT_SECONDS = 10.0
"""How long an attempt on a member that discovery lost may be silent: a dead node sends no reset."""

WAIT_WARNING_SECONDS = 10.0
"""How often the log says why requests wait for a replica."""

WAIT_POLL_SECONDS = 0.5
"""A waiting request looks again at least this often: some exclusions end by time alone."""
