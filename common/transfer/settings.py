"""Durations of transfers, in seconds, each with its reason."""

from __future__ import annotations

LEASE_SECONDS = 30.0
"""Silence after which the other end counts as dead, and its transfer ends. A trainer may hold the interpreter's lock
for seconds while it saves or compiles; a slot must not stay taken for longer than a publish waits."""

HOP_SECONDS = 5.0
"""Silence after which a worker that others fetch from counts as dead: the others have more holders, and pings come each second."""

PING_SECONDS = 1.0
"""How often an end that has nothing to send sends a ping: several times within `HOP_SECONDS`."""

PING_STOP_SECONDS = 1.0
"""How long to wait for a ping to end: later its thread ends by the connection's own deadline."""

LEAST_LATE_SECONDS = 0.25
"""A piece is never late before this: the scheduler of a busy machine may delay a holder for as long."""

QUICK_PIECE_SECONDS = 0.02
"""A piece that comes within this, from its request, waited for no other: then more are asked for at once, since a request for
each piece takes a quarter of what the piece costs the loop."""

LATE_LOOK_SECONDS = 0.05
"""How often the fetcher looks for late pieces: small compared with the time that makes one late."""

ANNOUNCE_SECONDS = 0.01
"""How long announcements of pieces are gathered: a frame for each would cost as much as the piece."""

ANNOUNCE_SECONDS_EACH = 0.0002
"""How long they are gathered for each fetcher, if that is more: a frame takes a quarter of it of the loop."""

RETRY_SECONDS = 0.005
"""After how long to retry a Unix socket whose queue was full: its owner empties it within about a millisecond."""

RETRANSMIT_SECONDS = 0.2
"""How long Linux waits at least before it sends a lost packet again, and twice as long before each further time."""

RETURN_SECONDS = 0.25
"""How long to wait for the older slot before a fresh one is made: fresh memory for a gigabyte costs more."""

BURST_SECONDS = 0.05
"""How much a rate limit allows at once after a pause, in seconds of the rate: a few pieces at a gigabyte a second."""

HOLD_SECONDS = 0.001
"""How long one connection may keep the loop before others have their turn: a turn costs a tenth of a piece."""

LINGER_SECONDS = 0.002
"""How long a thread waits for more of a payload before it leaves that to the loop: on a fast link more comes within
microseconds, and slow ones must not occupy the threads."""

TURN_SECONDS = 0.25
"""How long a thread works on one payload: more payloads than threads may be on their way over slow links."""

NIXL_START_SECONDS = 60.0
"""How long a process with NIXL may take to start: it looks for network devices, on a machine that may be busy."""

READ_LOOK_SECONDS = 0.0001
"""How often that process looks at what it reads: a tenth of what a piece takes over TCP."""

SERVE_LOOK_SECONDS = 0.001
"""How often it looks whether others read from it: over TCP it sends the bytes itself. It takes 3 % of a processor."""

UNMAP_SECONDS = 60.0
"""How long addresses of memory that was served stay mapped, to zeros: well above the silence after which a fetcher is dropped."""
