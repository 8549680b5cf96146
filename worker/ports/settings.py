"""Durations of this package in seconds, each with its reason."""

from __future__ import annotations

TOKEN_FILE_SECONDS = CREDENTIALS_FILE_SECONDS = 5.0
"""To read a mounted token: milliseconds, unless the file system hangs; then the caller gets a 503 to try again."""

CERTIFICATE_FILE_SECONDS = 10.0
"""To read a renewed certificate; no caller waits for it."""

CERTIFICATE_RELOAD_SECONDS = 60.0
"""Between two readings: the kubelet takes about as long to update a mounted Secret."""

REVIEW_TIMEOUT_SECONDS = 10.0
"""For one answer of the API server, which takes milliseconds; callers give up after some 10 s."""

REVIEW_SECONDS = 15.0
"""For a review with its time in the queue: one that hangs before it, and its own."""

TOKEN_RETRY_SECONDS = 1.0
"""For the review of a token that was accepted before: the head counts the seconds that its members are silent."""

ACCEPTED_SECONDS = 300.0
"""An accepted answer counts so long: a right that is withdrawn lasts so long at most."""

RENEW_SECONDS = 60.0
"""How long before it expires an accepted answer is renewed: an API server that restarts is back by then."""

DENIED_SECONDS = 5.0
"""A denied answer counts so long: a right that is granted should work soon."""

HEADER_TIMEOUT_SECONDS = 10.0
"""For the header of a request, and for the handshake of TLS: over a slow link both take about a second."""

IDLE_GRACE_SECONDS = 0.5
"""For a handshake that other connections wait for; a slower one is the first to be closed for a new one."""

UNREAD_ANSWER_SECONDS = 60.0
"""How long a client may read nothing of an answer: it may stand still for a garbage collection or a checkpoint."""

SWEEP_INTERVAL_SECONDS = 1.0
"""Between two looks for slow connections, which the other limits count in seconds."""

ACCEPT_RETRY_SECONDS = WEIGHTS_ACCEPT_RETRY_SECONDS = 0.1
"""Between two attempts to accept a connection without a free descriptor; a closed one frees it at once."""

ANSWER_FLUSH_SECONDS = 5
"""For open connections to read their last bytes, within the pod's grace period."""

KEEP_ALIVE_SECONDS = 75
"""Longer than the pools of usual clients, so that they close first and never use a closed connection."""

FOLDER_LOCK_SECONDS = 1.0
"""For another process to make or remove a socket in the same folder, which takes milliseconds."""

GREETING_TIMEOUT_SECONDS = 10.0
"""For a connection to show its ticket, with the handshake of TLS before it."""

FAREWELL_SECONDS = 1.0
"""For a refused connection to read the reason before it is closed."""

THREAD_STOP_SECONDS = 5.0
"""For the thread of an interrupted connection to end: it may be in the middle of a copy."""

MAX_WAIT_SECONDS = 60.0
"""Longest wait of one `GET /v1/state`: proxies close connections that are silent for longer."""

LENDER_GREETING_SECONDS = 30.0
"""For a trainer's process to say what it lends, which it does at once, and for one of the engine to say where it is."""

LENDING_LOOK_SECONDS = 0.5
"""Between two looks at a version that a trainer has lent: changes of it wake the one who looks at once."""

LENT_IDLE_SECONDS = 10.0
"""How long a worker that nobody wakes keeps lent weights, and with them the turn, from others who wait for the devices:
a trainer wakes the pool as soon as it has left the turn."""

MAX_LENDING_SECONDS = 86_400.0
"""Longest deadline of a version that a trainer lends: a day, as for any publish."""

LENDERS_SECONDS = 60.0
"""For all processes of a trainer to lend a version, which they do together: the first ones wait in the meantime."""
