"""How long things may take in this package, and why."""

from __future__ import annotations

# auth.py

TOKEN_FILE_SECONDS = 5.0
"""What a file with a token may take to be read."""


# kubernetes_auth.py

CREDENTIALS_FILE_SECONDS = 5.0
"""What our own token may take to be read."""


# port_connections.py

ACCEPT_RETRY_SECONDS = 0.1
"""After which a connection is accepted again when there was no descriptor for one."""


# serving_certificate.py

CERTIFICATE_FILE_SECONDS = 10.0
"""What the files may take to be read."""


# weights_port.py

WEIGHTS_ACCEPT_RETRY_SECONDS = 0.1
"""After which a connection is taken again when there was no descriptor for one."""


# head_token_review.py

TOKEN_RETRY_SECONDS = 1.0
"""What the API server gets to say of a token that was let in before: the head counts the seconds."""


# kubernetes_auth.py

REVIEW_TIMEOUT_SECONDS = 10.0


# port_connections.py

HEADER_TIMEOUT_SECONDS = 10.0
"""What the header of a request may take to arrive; also the handshake of TLS."""

IDLE_GRACE_SECONDS = 0.5
"""Whoever takes longer for a handshake gives its place up before anybody else."""

UNREAD_ANSWER_SECONDS = 60.0
"""A client that takes nothing for so long of what it was sent is not waited for."""

SWEEP_INTERVAL_SECONDS = 1.0


# server.py

ANSWER_FLUSH_SECONDS = 5
"""What open connections get to take their last bytes."""

KEEP_ALIVE_SECONDS = 75
"""Longer than the pools of usual clients, so that they close first and never hit a closed one."""


# serving_certificate.py

CERTIFICATE_RELOAD_SECONDS = 60.0


# token_reviews.py

ACCEPTED_SECONDS = 300.0

RENEW_SECONDS = 60.0
"""So long before it expires, an accepted answer is asked for again by the next call."""

DENIED_SECONDS = 5.0

REVIEW_SECONDS = 15.0
"""What a review may take, with its time in the queue."""


# unix_socket.py

FOLDER_LOCK_SECONDS = 1.0
"""How long another process may be about to make or remove a socket in the same folder."""


# weights_port.py

GREETING_TIMEOUT_SECONDS = 10.0
"""What a connection gets to say what it has come for."""

THREAD_STOP_SECONDS = 5.0

FAREWELL_SECONDS = 1.0
"""What who is turned away gets to read why."""
