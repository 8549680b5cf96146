"""What a reconcile pass is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollout_client.control import WorkerControl

from .calls import Calls
from .config import Config
from .expectations import Expectations
from .kube import Kube
from .poller import Poller
from .recorder import Recorder
from .store import Key, Store
from .telemetry import Telemetry
from .workqueue import WorkQueue


@dataclass(frozen=True, slots=True)
class Context:
    """Everything around a pass.

    Attributes:
        control: Makes the client of a worker's control port from the pool and `host:port`.
        clock: Wall-clock seconds.
        fence: Whether this process may act now; writes are refused otherwise anyway.
    """

    config: Config
    store: Store
    expectations: Expectations
    kube: Kube
    calls: Calls
    poller: Poller
    control: Callable[[Key, str], WorkerControl]
    recorder: Recorder
    telemetry: Telemetry
    queue: WorkQueue[Key]
    clock: Callable[[], float]
    fence: Callable[[], bool]


Reconcile = Callable[[Key], Awaitable[float | None]]
"""One pass over a pool; returns in how many seconds to look again, or None."""
