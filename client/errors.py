"""All errors that a caller of this package can get, as one tree.

    RolloutError
    ├── RequestError            a generation failed; `kept` is what was received
    │   ├── RequestRefused      the request itself is wrong: trying again does not help
    │   ├── NoReplica           no replica could take it before the deadline
    │   ├── RequestFailed       too many attempts broke, or the weights make no token
    │   ├── DeadlineExceeded    the request's own deadline passed
    │   ├── VersionChanged      the weights changed, and `on_version_change` is `fail`
    │   └── PoolClosed          the pool was closed
    ├── ManyFailed              some requests of generate_many failed; `results` has them all
    ├── EpochLost               another trainer took the pool
    ├── PublishError            new weights do not serve
    │   ├── PublishFailed       some replica can't use them; says which one and why
    │   └── Superseded          newer weights took their place
    ├── SteeringFailed          sleep, wake or pause failed
    ├── TurnFailed              the devices were not free in time; `waiting_for` names their holders
    └── ClusterError            the API server refused, or could not be reached

`replica` names the member that was asked last (None: no member), `cause` is one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .results import GenerateResult


class RolloutError(Exception):
    """Base of all errors of this package.

    Attributes:
        cause: What happened, and what to do about it, if anything.
        replica: Name of the replica on which it happened; None: on no replica.
    """

    def __init__(self, cause: str, *, replica: str | None = None) -> None:
        super().__init__(cause if replica is None else f"{replica}: {cause}")
        self.cause = cause
        self.replica = replica


class RequestError(RolloutError):
    """A generation ended without its full output.

    Attributes:
        kept: What was received, with unfinished outputs marked `aborted`; None: nothing.
    """

    kept: GenerateResult | None = None


class RequestRefused(RequestError):
    """The request is wrong: no replica would accept it.

    Attributes:
        status: HTTP status of the answer.
        slug: Kind of the problem, such as `too-long`.
    """

    def __init__(
        self, cause: str, *, replica: str | None = None, status: int = 0, slug: str = ""
    ) -> None:
        super().__init__(cause, replica=replica)
        self.status = status
        self.slug = slug


class NoReplica(RequestError):
    """No replica could take the request in time; the cause says why, for each replica."""


class RequestFailed(RequestError):
    """More than `max_failures` attempts broke: perhaps the request crashes engines.

    Or the weights give logits that are not finite (NaN), so that no attempt can succeed.
    """


class DeadlineExceeded(RequestError):
    """The request's `deadline_seconds` have passed."""


class VersionChanged(RequestError):
    """The weights changed within an output and `on_version_change` is `fail`."""


class ManyFailed(RolloutError):
    """Some requests of a batch failed; all others ran to their end first.

    Attributes:
        results: A result or an error for each request, in the order of the requests.
    """

    def __init__(self, results: Sequence[GenerateResult | RolloutError]) -> None:
        if isinstance(results, str):
            # torch's DataLoader makes a worker's error again of its text, and of a RuntimeError where that fails.
            raise TypeError("ManyFailed is made of results")
        self.results = list(results)
        failed = [each for each in self.results if isinstance(each, RolloutError)]
        first = failed[0] if failed else "none"
        super().__init__(
            f"{len(failed)} of {len(self.results)} requests failed; the first error: {first}"
        )

    def __reduce__(self) -> tuple[type[ManyFailed], tuple[list[GenerateResult | RolloutError]]]:
        """Pickle the results: by default the text would be passed to `__init__`."""
        return type(self), (self.results,)


class EpochLost(RolloutError):
    """Another trainer holds the pool now. Stop this one, or `acquire` again on purpose."""


class PublishError(RolloutError):
    """New weights do not serve."""


class PublishFailed(PublishError):
    """The weights were refused, or not all replicas took them in time."""


class Superseded(PublishError):
    """Newer weights took their place."""


class SteeringFailed(RolloutError):
    """A change of state was refused, undone by another client, or not complete in time."""


class StateTaken(SteeringFailed):
    """Another client asked the pool for another state in between.

    Attributes:
        wanted: That state.
    """

    def __init__(self, cause: str, *, wanted: str = "") -> None:
        super().__init__(cause)
        self.wanted = wanted


class TurnFailed(RolloutError):
    """The turn on shared devices was not acquired: nothing is held, and the pool was woken again.

    Attributes:
        waiting_for: The holder of each device at the deadline; empty: it failed for another reason.
    """

    def __init__(self, cause: str, *, waiting_for: Mapping[str, str] | None = None) -> None:
        super().__init__(cause)
        self.waiting_for = dict(waiting_for or {})


class ClusterError(RolloutError):
    """The API server refused, or did not answer.

    Attributes:
        status: HTTP status; 0: the API server did not answer.
        reason: The API server's reason, such as `Forbidden`.
    """

    def __init__(self, cause: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(cause)
        self.status = status
        self.reason = reason

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later: no answer, overload, an error of the server."""
        return self.status in (0, 408, 429) or self.status >= 500


class PoolClosed(RequestError):
    """The pool was closed before this call, or during it."""
