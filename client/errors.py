"""Everything that can go wrong for a caller of this package, as one tree.

    RolloutError
    ├── RequestError            a generation; `kept` is what had been received
    │   ├── RequestRefused      the request itself is wrong: trying again can't help
    │   ├── NoReplica           no replica could take it before the deadline
    │   ├── RequestFailed       too many attempts broke
    │   ├── DeadlineExceeded    the request's own time is over
    │   ├── VersionChanged      other weights, and the caller asked to be told
    │   └── PoolClosed          the pool was closed
    ├── ManyFailed              some requests of generate_many; the others are in `results`
    ├── EpochLost               another trainer took the pool
    ├── PublishError            new weights
    │   ├── PublishFailed       they can't be used, or not by all; says which replica and why
    │   └── Superseded          newer weights took their place
    ├── SteeringFailed          sleep, wake, pause
    └── ClusterError            the API server refused or could not be reached

`replica` names the member that was asked last (None: nobody was), `cause` is one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .results import GenerateResult


class RolloutError(Exception):
    """Base of all errors of this package.

    Attributes:
        cause: What happened, and what to do where something can be done.
        replica: Name of the replica that it happened on, if it was one.
    """

    def __init__(self, cause: str, *, replica: str | None = None) -> None:
        super().__init__(cause if replica is None else f"{replica}: {cause}")
        self.cause = cause
        self.replica = replica


class RequestError(RolloutError):
    """A generation ended without its full output.

    Attributes:
        kept: What had been received by then, its unfinished outputs marked `aborted`; None:
            nothing.
    """

    def __init__(
        self, cause: str, *, replica: str | None = None, kept: GenerateResult | None = None
    ) -> None:
        super().__init__(cause, replica=replica)
        self.kept = kept


class RequestRefused(RequestError):
    """A worker says that the request is wrong; no replica will take it.

    Attributes:
        status: HTTP status of the answer.
        slug: Kind of the problem, such as `too-long`.
    """

    def __init__(
        self,
        cause: str,
        *,
        replica: str | None = None,
        kept: GenerateResult | None = None,
        status: int = 0,
        slug: str = "",
    ) -> None:
        super().__init__(cause, replica=replica, kept=kept)
        self.status = status
        self.slug = slug


class NoReplica(RequestError):
    """No replica could take the request in time; the cause says why for each."""


class RequestFailed(RequestError):
    """Attempts broke more often than `max_failures`: perhaps the request breaks engines."""


class DeadlineExceeded(RequestError):
    """The request's `deadline_seconds` are over."""


class VersionChanged(RequestError):
    """The weights changed within an output and `on_version_change` is `fail`."""


class ManyFailed(RolloutError):
    """Some requests of a batch failed; all others were finished first.

    Attributes:
        results: In the order of the requests, a result or the error.
    """

    def __init__(self, results: Sequence[GenerateResult | RolloutError]) -> None:
        self.results = list(results)
        failed = [each for each in self.results if isinstance(each, RolloutError)]
        first = failed[0] if failed else "nothing"
        super().__init__(f"{len(failed)} of {len(self.results)} requests failed, first: {first}")


class EpochLost(RolloutError):
    """Another trainer holds the pool now; end this one, or `acquire` again on purpose."""


class PublishError(RolloutError):
    """New weights did not come to serve."""


class PublishFailed(PublishError):
    """The weights were refused, or not all replicas took them in time."""


class Superseded(PublishError):
    """Newer weights took their place."""


class SteeringFailed(RolloutError):
    """A change of state was refused, undone by somebody else, or not reached in time."""


class ClusterError(RolloutError):
    """The API server refused or did not answer.

    Attributes:
        status: HTTP status; 0: there was no answer.
        reason: The API server's word for it, such as `Forbidden`.
    """

    def __init__(self, cause: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(cause)
        self.status = status
        self.reason = reason


class PoolClosed(RequestError):
    """The pool was closed while, or before, this was asked."""
