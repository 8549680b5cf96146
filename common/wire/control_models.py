"""Wire models of the control port: the worker's state, holds, sleep, and abort."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from .weights_models import CommitResponse, WeightsState
from .wire_base import (
    Body,
    Bool,
    Float,
    InFlightPolicy,
    Int,
    Lifecycle,
    MemoryTag,
    Progress,
    Seconds,
    Wire,
    bounded_length,
)

__all__ = [
    "AbortRequest",
    "AbortResponse",
    "Committed",
    "Hold",
    "PauseRequest",
    "ReleaseRequest",
    "ResetRequest",
    "Resident",
    "SleepRequest",
    "TurnState",
    "WakeRequest",
    "WorkerState",
]


class Resident(Wire):
    """Which memory the engine has allocated."""

    weights: bool
    kv_cache: bool


class Hold(Wire):
    """A live hold; the most restrictive hold decides the worker's state."""

    holder: str
    state: Literal["Paused", "Asleep"]
    ttl: Seconds | None = Field(
        default=None, description="Seconds until the hold expires; null: it does not expire."
    )


class TurnState(Wire):
    """Whether the worker may hold memory of its devices, which others use by turns."""

    state: Literal["Held", "Waiting", "Released"]
    devices: tuple[str, ...] = Field(
        description="Names of the devices, in the order of their locks."
    )
    waiting_for: dict[str, str] = Field(
        default_factory=dict, description="The device that it waits for, and who holds it."
    )
    lent: bool = Field(
        default=False,
        description="A trainer has lent the turn with its weights, whose memory is awake while the worker sleeps.",
    )


class WorkerState(Wire):
    """Response of `GET /v1/state`."""

    boot_id: str = Field(description="Identifies this worker process; a restart changes it.")
    seq: int = Field(
        default=0,
        description="Number of this state in the process: higher after each change of anything but in_flight, queued"
        " and the seconds of holds. `?since=SEQ&wait=SECONDS` waits for another one.",
    )
    engine: str
    lifecycle: Lifecycle
    serving: bool = Field(description="Whether the worker accepts requests; same as GET /ready.")
    weights: WeightsState
    resident: Resident
    holds: tuple[Hold, ...] = ()
    caller: str = Field(
        default="", description="The name under which this caller's holds are listed."
    )
    generation: int | None = Field(
        default=None, description="Highest metadata.generation seen in an operator's call."
    )
    drain_seconds: float | None = Field(
        default=None,
        description="What running requests get when the process is asked to end; a worker that"
        " does not say takes no other value.",
    )
    in_flight: int = 0
    queued: int = 0
    restarts: int = 0
    last_error: str | None = None
    progress: Progress | None = None
    turn: TurnState | None = Field(
        default=None, description="Null unless the engine shares its devices by turns."
    )
    in_flight_policies: tuple[InFlightPolicy, ...] = Field(
        default=(),
        description="Policies for requests in flight that a commit may use, once an engine has"
        " loaded; what `capabilities.in_flight` of GET /v1/info says.",
    )
    wakes_empty: bool = Field(
        default=False,
        description="Whether `POST /v1/wake` takes `load: false`, once an engine has loaded.",
    )

    @property
    def held_by_others(self) -> bool:
        """Whether anybody but the caller keeps the worker from its work."""
        return any(hold.holder != self.caller for hold in self.holds)


class Committed(CommitResponse):
    """Answer of `POST /v1/weights/commit`: what the commit did, and the worker's state right after it."""

    state: WorkerState | None = Field(
        default=None,
        description="What `GET /v1/state` would say now; of a worker that leaves it out, ask.",
    )


class PauseRequest(Body):
    """Body of `POST /v1/pause`."""

    mode: Literal["drain", "abort", "keep"] = "drain"
    deadline_seconds: Float = Field(default=30, ge=0, le=86400)
    ttl_seconds: Float | None = Field(default=None, gt=0, le=86400)
    generation: Int | None = Field(default=None, ge=0)


class ReleaseRequest(Body):
    """Body of `POST /v1/resume`, which releases the caller's pause."""

    generation: Int | None = Field(default=None, ge=0)


def _check_whole_number(level: object) -> object:
    if type(level) is not int:  # True and 1.0 equal 1
        raise ValueError("must be 1 or 2")
    return level


Tags = Annotated[tuple[MemoryTag, ...], Field(min_length=1, max_length=16, fail_fast=True)]


class SleepRequest(Body):
    """Body of `POST /v1/sleep`."""

    level: Annotated[Literal[1, 2], BeforeValidator(_check_whole_number)] = 1
    tags: Tags = ("weights", "kv_cache")
    mode: Literal["drain", "abort", "keep"] = "drain"
    deadline_seconds: Float = Field(default=30, ge=0, le=86400)
    generation: Int | None = Field(default=None, ge=0)


class WakeRequest(Body):
    """Body of `POST /v1/wake`, which releases the caller's sleep for these tags.

    `load`: false for weights that are to be replaced at once: their memory comes back without
    values, and the worker stays closed until a commit gives it some. None is true, and left out of
    what is sent: an older worker refuses a field that it doesn't know.
    """

    tags: Tags = ("weights", "kv_cache")
    load: Bool | None = None
    generation: Int | None = Field(default=None, ge=0)


class ResetRequest(Body):
    """Body of `POST /v1/cache/reset`: an empty object."""


MAX_ABORTED = 2**16
"""Most requests that one call ends by name."""

RequestIds = Annotated[
    tuple[Annotated[str, Field(max_length=256)], ...],
    Field(max_length=MAX_ABORTED, fail_fast=True),
    bounded_length(MAX_ABORTED),
]


class AbortRequest(Body):
    """Body of `POST /v1/abort`: either request ids or `all`."""

    request_ids: RequestIds | None = None
    all: Bool = False

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.request_ids is None) != self.all:
            raise ValueError('set either request_ids or "all": true')
        return self


class AbortResponse(Wire):
    """The requests that were aborted, and the ids that were not in flight."""

    aborted: tuple[str, ...]
    unknown: tuple[str, ...]
