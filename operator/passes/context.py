"""What a reconcile pass is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rollout_operator.api.objects import Key
from rollout_operator.cache.neighbours import Neighbourhood
from rollout_operator.cache.store import Store
from rollout_operator.config import Config
from rollout_operator.kube.client import Kube
from rollout_operator.kube.events import Recorder
from rollout_operator.telemetry import Telemetry
from rollout_operator.workers.talk import Workers


@dataclass(frozen=True, slots=True)
class Context:
    """Everything around a pass.

    Attributes:
        clock: Wall-clock seconds, to compare with the API server's times.
        monotonic: Monotonic seconds, for every interval that begins in this process.
    """

    config: Config
    store: Store
    neighbours: Neighbourhood
    kube: Kube
    workers: Workers
    recorder: Recorder
    telemetry: Telemetry
    clock: Callable[[], float]
    monotonic: Callable[[], float]


Reconcile = Callable[[Key], Awaitable[float | None]]
"""One pass over a pool; returns in how many seconds to look again, or None."""
