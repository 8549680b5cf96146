"""What a trainer can do to a pool besides generating.

`direct_steering` calls the workers of a pool without an operator, `cluster_steering` writes the
RolloutReplica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal, Protocol, SupportsFloat

from rollout_client.errors import PublishFailed
from rollout_common.wire import MAX_IDENTITY, WeightsDtypes, WeightsId, WeightsSource

from .settings import MAX_PUBLISH_SECONDS

if TYPE_CHECKING:
    from .pushing.push import Push

PoolState = Literal["Active", "Paused", "Asleep"]

MISMATCH = "content-mismatch"


@dataclass(frozen=True, slots=True)
class PublishProgress:
    """The progress of a publish.

    Attributes:
        phase: `Staging`, `Committing` or `Complete`.
        done: Replicas that have staged, or committed.
        total: Replicas that it waits for.
        message: The same in one sentence.
        bytes_done: Pushed bytes that the replicas have, in total; 0 for files.
        bytes_total: Pushed bytes that they will have.
    """

    phase: str
    done: int
    total: int
    message: str
    bytes_done: int = 0
    bytes_total: int = 0


OnProgress = Callable[[PublishProgress], None]


@dataclass(frozen=True, slots=True)
class PushedTo:
    """How pushed weights reached one replica.

    Attributes:
        transport: `shm`, `tcp` or `nixl`.
        seconds: From its ticket to the moment when it had staged them.
        error: Why it has not staged them; None: it has.
        delta: Whether at least a part came as a difference to the version before.
    """

    transport: str
    seconds: float
    error: str | None = None
    delta: bool = False


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The outcome of pushed tensors.

    Attributes:
        bytes: Size of one copy, gaps included.
        seconds: By phase, in this order: `plan` (the tensors' layout is known and replicas
            wait), `copy` (all tensors are in shared memory, hashed), `transfer` (every replica has
            every byte), `stage` (every replica has verified them), `commit`.
        replicas: By name.
        bytes_sent: What this process sent over TCP; with several ranks, what rank 0 sent.
    """

    bytes: int
    seconds: Mapping[str, float]
    replicas: Mapping[str, PushedTo]
    bytes_sent: int = 0

    @property
    def deltas(self) -> int:
        """How many replicas received differences to the version before."""
        return sum(each.delta for each in self.replicas.values())


@dataclass(frozen=True, slots=True)
class Published:
    """Weights that serve now.

    Attributes:
        identity: (epoch, version).
        root_hash: Hash of their content; None: not known.
        replicas: How many replicas have them; those that join later load them first.
        seconds: Duration of the call.
        pause_seconds: The longest time that a replica made no token; None: not known.
        message: The same in one sentence, with the replicas that do not have them yet.
        report: On pushed tensors; None: the weights were published by their path.
    """

    identity: WeightsId
    root_hash: str | None
    replicas: int
    seconds: float
    pause_seconds: float | None
    message: str
    report: PublishReport | None = None


class HandedOverVersion(Protocol):
    """What `hand_over` of `rollout_worker.embedded.Worker` and of a turn returns: weights that workers have staged."""

    @property
    def epoch(self) -> int:
        """The trainer's epoch under which they were handed over."""

    @property
    def version(self) -> int:
        """The weights version."""

    @property
    def root_hash(self) -> str:
        """Hash of their content."""


def content_mismatch_error(
    identity: WeightsId, sent: str, found: str | None, replica: str | None = None
) -> PublishFailed:
    """Return the error for an identity that already has content other than what was sent."""
    return PublishFailed(
        f"{MISMATCH}: weights {identity} have root_hash {found}, and what was published has {sent}:"
        " publish new content under a higher version",
        replica=replica,
    )


class Steering(Protocol):
    """The verbs; each waits until it is done, up to a deadline.

    All raise SteeringFailed when a worker refuses or nobody answers, EpochLost when another trainer has
    the pool, and ClusterError when the API server fails or does not allow it.
    """

    @property
    def lowest_identity(self) -> WeightsId | None:
        """The oldest weights that may serve this pool; None: the workers check it."""

    async def acquire_epoch(self, seconds: float) -> int:
        """Take the next epoch; from then on earlier trainers are refused."""

    async def publish_identity(
        self,
        identity: WeightsId,
        source: WeightsSource,
        seconds: float,
        tell: OnProgress,
        push: Push | None = None,
        root_hash: str | None = None,
    ) -> Published:
        """Publish weights to all replicas; with `push` its bytes go to them first.

        Args:
            identity: Of the weights.
            source: Where replicas find them.
            seconds: Deadline for the whole call.
            tell: Called with the progress.
            push: Brings the bytes; None: the replicas read them.
            root_hash: Of their content, if it is known already; a replica with other content under this
                identity ends the publish.

        Raises:
            PublishFailed: A replica can't use the weights, has other content under their identity, or
                time ran out.
            Superseded: Newer weights replaced these.
        """

    async def describe_checkpoint(self) -> WeightsDtypes:
        """Return the dtypes that tensors must have, by name, and the root hash of the model's checkpoint."""

    async def change_state(self, state: PoolState, seconds: float) -> int:
        """Move all replicas to a state; return how many of them serve then."""

    async def ask_state(self, state: PoolState, seconds: float) -> None:
        """Ask for a state; the operator, or the keeper of the pool, moves the replicas to it."""

    async def wanted_state(self) -> PoolState | None:
        """Return the state that was asked for last; None: not known."""

    async def close(self) -> None:
        """Close all connections."""


def source_from_path(path: str | PurePath | None) -> WeightsSource:
    """Return the source for a path as the workers see it; None: the model's own checkpoint."""
    if path is None:
        return WeightsSource.model_validate({"checkpoint": {}})
    return WeightsSource(path=str(path))


def publish_seconds(seconds: float) -> float:
    """Return the deadline of a publish; workers take at most a day.

    Raises:
        ValueError: It is not such a number.
    """
    if not isinstance(seconds, SupportsFloat) or not 0 < float(seconds) <= MAX_PUBLISH_SECONDS:
        raise ValueError(
            f"seconds must be a number above 0, at most {MAX_PUBLISH_SECONDS:g}, not {seconds!r}"
        )
    return float(seconds)


def seconds_left(began: float, seconds: float) -> float:
    """Return what is left of a deadline; a number that messages can show."""
    left = max(0.0, seconds - (time.monotonic() - began))
    return round(left, 1) if left > 0.1 else left


def whole_version(version: int) -> int:
    """Return a version, be it numpy's or torch's, as an `int`.

    Raises:
        ValueError: It is not a whole number, or out of range.
    """
    try:
        whole = None if isinstance(version, bool) else version.__index__()
    except (AttributeError, TypeError):
        whole = None
    if whole is None:
        raise ValueError(f"version must be a whole number, not {version!r}")
    if not 0 <= whole <= MAX_IDENTITY:
        raise ValueError(f"version must be 0 to {MAX_IDENTITY}, not {whole}")
    return whole
