"""How long things may take in the modules at the top of this package, in seconds, and why."""

from __future__ import annotations

CLOSE_SECONDS = 30.0
"""How long `close` waits for the loop's thread: its tasks are cancelled, and may clean up."""

CHECK_SECONDS = 1.0
"""How often a waiting thread checks that the loop's thread is still alive."""

STATE_TIMEOUT_SECONDS = 3.0
"""A worker answers from memory: one that takes longer is reported as unreachable."""

QUICK_CALL_SECONDS = 10.0
"""For verbs that only record something: the worker may be busy, the work itself takes no time."""

LAST_REQUEST_SECONDS = 1.0
"""What a request to the API server gets at least, however near its caller's deadline is: enough for a healthy one."""

DEADLINE_SLACK_SECONDS = 120.0
"""How long a verb may take beyond its own deadline: it moves a model's memory, or loads it again."""

CONNECT_TIMEOUT_SECONDS = 5.0
"""Enough for two lost SYN packets, which are sent again after one and three seconds."""

WRITE_TIMEOUT_SECONDS = 60.0
"""A request of megabytes may wait for a worker whose event loop is busy."""

KEEP_ALIVE_SECONDS = 60.0
"""Less than the 75 s for which a worker keeps an idle connection."""
