"""What a trainer does to a pool beside generating: the words, whoever carries them out.

`direct` speaks to the workers of a pool without an operator, `cluster` to the RolloutReplica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, Protocol

from rollout_worker.schemas import WeightsId, WeightsSource

PoolState = Literal["Active", "Paused", "Asleep"]

PUBLISH_SECONDS = 600.0
STATE_SECONDS = 600.0
ACQUIRE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PublishProgress:
    """How far a publish is.

    Attributes:
        phase: `Staging`, `Committing` or `Complete`.
        done: Replicas that have staged, or committed.
        total: Replicas that are waited for.
        message: One sentence.
    """

    phase: str
    done: int
    total: int
    message: str


OnProgress = Callable[[PublishProgress], None]


@dataclass(frozen=True, slots=True)
class Published:
    """Weights that serve now.

    Attributes:
        identity: (epoch, version).
        root_hash: Hash of their content, where it was told.
        replicas: Replicas that have them; joiners load them.
        seconds: From the call to the end.
        pause_seconds: Longest time that a replica made no token; None: not known.
        message: One sentence, also of those that do not have them yet.
    """

    identity: WeightsId
    root_hash: str | None
    replicas: int
    seconds: float
    pause_seconds: float | None
    message: str


class Steering(Protocol):
    """The verbs; each waits for its end and has a deadline."""

    @property
    def floor(self) -> WeightsId | None:
        """Weights below which this pool's client must use nobody; None: the workers see to it."""

    async def acquire(self, seconds: float) -> int:
        """Take the next epoch; from then on former trainers are refused."""

    async def publish(
        self, identity: WeightsId, source: WeightsSource, seconds: float, tell: OnProgress
    ) -> Published:
        """Bring weights to all replicas."""

    async def bring(self, state: PoolState, seconds: float) -> None:
        """Bring all replicas to a state."""

    async def state(self) -> PoolState | None:
        """The state that was asked for last, as far as it is known."""

    async def close(self) -> None:
        """Close what is open."""


def source_of(path: str | PurePath | None) -> WeightsSource:
    """Return the source for a path as the workers see it; None: the model's own checkpoint."""
    if path is None:
        return WeightsSource.model_validate({"checkpoint": {}})
    return WeightsSource(path=str(path))
