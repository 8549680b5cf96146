"""How long things may take in this package, in seconds, and why."""

from __future__ import annotations

# Credentials.

HEADERS_REUSE_SECONDS = 10.0
"""How long a token is used before it is asked for again, be it in a file: well below every margin of expiry,
and thousands of requests need not read a file each."""

PLUGIN_TIMEOUT_SECONDS = 60.0
"""Programs that ask a cloud for a token answer within seconds; a slow proxy may add some."""

EXPIRY_MARGIN_SECONDS = 30.0
"""A credential is replaced this long before it expires: clocks differ, and requests take time."""

UNDATED_LIFETIME_SECONDS = 300.0
"""A credential without an expiry is used this long, which costs one run of the program in five minutes."""

# Requests.

REQUEST_TIMEOUT_SECONDS = 30.0
"""Below the API server's own limit of 60, so that a lost connection is noticed soon."""

CONNECT_TIMEOUT_SECONDS = 5.0
"""A handshake takes milliseconds; five seconds leave room for two lost packets."""

# List and watch.

WATCH_TIMEOUT_SECONDS = 240.0
"""The API server ends a watch after this time, and everything is listed again: it bounds how long
anything that the watch missed stays unknown."""

WATCH_SILENCE_SECONDS = 135.0
"""Bookmarks come every minute: a stream that is silent for longer than two of them is dead."""

MIN_RETRY_PAUSE_SECONDS = 0.2
"""The first pause; one lost connection should hardly be noticed."""

MAX_RETRY_PAUSE_SECONDS = 10.0
"""The longest pause of one client: many clients must not hold down an API server that starts again."""
