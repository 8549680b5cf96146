"""All errors that a caller of this package can get, as one tree.

    RolloutError
    ├── RequestError            a generation failed; `kept` is what had been received
    │   ├── RequestRefused      the request itself is wrong: trying again can't help
    │   ├── NoReplica           no replica could take it before the deadline
    │   ├── RequestFailed       too many attempts broke, or the weights make no token
    │   ├── DeadlineExceeded    the request's own time is up
    │   ├── VersionChanged      the weights changed, and the caller asked to be told
    │   └── PoolClosed          the pool was closed
    ├── ManyFailed              some requests of generate_many failed; `results` has them all
    ├── EpochLost               another trainer took the pool
    ├── PublishError            new weights do not serve
    │   ├── PublishFailed       they can't be used, or not by all; says by which replica and why
    │   └── Superseded          newer weights took their place
    ├── SteeringFailed          sleep, wake or pause failed
    ├── TurnFailed              the devices were not had; `waiting_for` says who has them
    └── ClusterError            the API server refused, or could not be reached

`replica` names the member that was asked last (None: none was), `cause` is one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .results import GenerateResult


class RolloutError(Exception):
    """Base of all errors of this package.

    Attributes:
        cause: What happened, and what to do about it if anything can be done.
        replica: Name of the replica that it happened on; None: it was not on one.
    """

    def __init__(self, cause: str, *, replica: str | None = None) -> None:
        super().__init__(cause if replica is None else f"{replica}: {cause}")
        self.cause = cause
        self.replica = replica


class RequestError(RolloutError):
    """A generation ended without its full output.

    Attributes:
        kept: What had been received by then, with unfinished outputs marked `aborted`; None:
            nothing.
    """

    def __init__(
        self, cause: str, *, replica: str | None = None, kept: GenerateResult | None = None
    ) -> None:
        super().__init__(cause, replica=replica)
        self.kept = kept


class RequestRefused(RequestError):
    """A worker says that the request is wrong: no replica would take it.

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
    """No replica could take the request in time; the cause says why, for each of them."""


class RequestFailed(RequestError):
    """More than `max_failures` attempts broke: perhaps the request crashes engines.

    Or the weights give logits that are not finite (NaN), which no other attempt mends; the cause names them.
    """


class DeadlineExceeded(RequestError):
    """The request's `deadline_seconds` have passed."""


class VersionChanged(RequestError):
    """The weights changed within an output and `on_version_change` is `fail`."""


class ManyFailed(RolloutError):
    """Some requests of a batch failed; all others ran to their end first.

    Attributes:
        results: In the order of the requests: for each a result, or the error.
    """

    def __init__(self, results: Sequence[GenerateResult | RolloutError]) -> None:
        self.results = list(results)
        failed = [each for each in self.results if isinstance(each, RolloutError)]
        first = failed[0] if failed else "none"
        super().__init__(
            f"{len(failed)} of {len(self.results)} requests failed; the first error: {first}"
        )

    def __reduce__(self) -> tuple[type[ManyFailed], tuple[list[GenerateResult | RolloutError]]]:
        """Pickle what it is made of: as other exceptions are, its text would become the results."""
        return type(self), (self.results,)


class EpochLost(RolloutError):
    """Another trainer has the pool now. Stop this one, or `acquire` again on purpose."""


class PublishError(RolloutError):
    """New weights do not serve."""


class PublishFailed(PublishError):
    """The weights were refused, or not all replicas took them in time."""


class Superseded(PublishError):
    """Newer weights took their place."""


class SteeringFailed(RolloutError):
    """A change of state was refused, undone by somebody else, or not complete in time."""


class StateTaken(SteeringFailed):
    """Somebody else asked the pool for another state meanwhile.

    Attributes:
        wanted: Which one.
    """

    def __init__(self, cause: str, *, replica: str | None = None, wanted: str = "") -> None:
        super().__init__(cause, replica=replica)
        self.wanted = wanted


class TurnFailed(RolloutError):
    """The turn on shared devices was not had: nothing is held, and the pool was asked back.

    Attributes:
        waiting_for: Who held which device when the time was up; empty: it failed for another reason.
    """

    def __init__(
        self,
        cause: str,
        *,
        replica: str | None = None,
        waiting_for: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(cause, replica=replica)
        self.waiting_for = dict(waiting_for or {})


class ClusterError(RolloutError):
    """The API server refused, or did not answer.

    Attributes:
        status: HTTP status; 0: there was no answer, or none that the API server gives.
        reason: The API server's word for it, such as `Forbidden`.
    """

    def __init__(self, cause: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(cause)
        self.status = status
        self.reason = reason

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed a little later: silence, overload, a defect there."""
        return self.status in (0, 408, 429) or self.status >= 500


class PoolClosed(RequestError):
    """The pool was closed while, or before, this was asked."""
