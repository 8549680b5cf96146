"""Durations of this package in seconds, each with its reason."""

from __future__ import annotations

BODY_TIMEOUT_SECONDS = 60.0
"""For a body to arrive: the largest one, some 100 MiB, over a slow link."""

ABORT_TIMEOUT_SECONDS = 30.0
"""For the engine to end an aborted request: a long step or two. Then the worker ends the request itself."""

ANSWER_TIMEOUT_SECONDS = 90.0
"""For a request to end after its deadline, before the worker gives up on it: longer than two aborts take."""

COMMENT_INTERVAL_SECONDS = 15.0
"""A stream is silent for so long at most: proxies cut a silent connection, nginx and load balancers after 60 s by default."""

PICTURES_TIMEOUT_SECONDS = 120.0
"""For the pictures of a request to be decoded, behind those of others: the largest that may wait take a minute."""
