"""How long things may take in this package, and why."""

from __future__ import annotations

# cluster_steering.py

STATUS_POLL_SECONDS = 0.2


# staging_barrier.py

MEMBERS_POLL_SECONDS = 1.0
"""How often replicas are asked whose connection for pushed bytes has fallen silent."""


# cluster_steering.py

RETRY_SECONDS = 0.02

QUICK_SECONDS = 10.0
"""How long a mere look at the object is tried while the API server fails."""

STRAGGLER_SECONDS = 60.0
"""How long waking waits for the last replicas once one serves: broken ones are for the operator."""


# control_ports.py

BUSY_RETRY_SECONDS = 20.0
"""How long an overloaded control port, or a proxy before it, is asked again."""

ASK_AGAIN_SECONDS = 0.5


# direct_steering.py

RETRY_INTERVAL_SECONDS = 0.5

STATE_ASK_SECONDS = 3.0
"""How long somebody who only asks for a wake waits for it."""

PROGRESS_INTERVAL_SECONDS = 1.0
"""What a worker gets to take note of a wake whose end nobody waits for."""


# head_staging.py

SLOW_HEAD_SECONDS = 30.0
"""How long a head that gives no answer in time is asked again. Were one that serves left out, the
update would wait for its bytes in vain; one that is stuck leaves the Service after half of that."""


# pool_keeper.py

KEEP_INTERVAL_SECONDS = 1.0

SEED_TIMEOUT_SECONDS = 600.0
"""How long one replica may take to stage the pool's weights."""


# staging_barrier.py

POLL_SECONDS = 0.1

DEAD_SECONDS = 5.0
"""A replica that does not answer for so long while it stages leaves the barrier."""


# steering_protocol.py

DEFAULT_PUBLISH_SECONDS = 600.0

DEFAULT_STATE_SECONDS = 600.0

DEFAULT_ACQUIRE_SECONDS = 30.0
