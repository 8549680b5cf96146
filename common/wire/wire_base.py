"""The building blocks of every wire model: strict scalars, identities of weights, enumerations."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_IDENTITY = 2**53 - 1
"""Largest epoch or version: the largest integer that JSON numbers represent exactly."""


MAX_TOKEN_ID = 2**31 - 1
"""Largest token id that engines can store; real vocabularies are far smaller."""


class Wire(BaseModel):
    """Base of everything that crosses a process boundary."""

    model_config = ConfigDict(extra="forbid", frozen=True)


MAX_UNKNOWN = 64
"""Unknown fields that are told or ignored one by one; a body with more of them is refused whole."""


def refuse_many_unknown(model: type[BaseModel], given: Any) -> Any:
    """Refuse many unknown fields at once: each would become an error of its own."""
    if isinstance(given, dict) and len(given) > len(model.model_fields) + MAX_UNKNOWN:
        known = len(model.model_fields)
        raise ValueError(f"has {len(given)} fields, where only {known} exist: remove the others")
    return given


class Body(Wire):
    """Base of everything that a caller sends."""

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, given: Any) -> Any:
        return refuse_many_unknown(cls, given)


# JSON tells numbers, booleans and strings apart; a client that mixes them up has a bug to find.
Int = Annotated[int, Field(strict=True)]


Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]


Bool = Annotated[bool, Field(strict=True)]


Identity = Annotated[Int, Field(ge=0, le=MAX_IDENTITY)]


TokenId = Annotated[Int, Field(ge=0, le=MAX_TOKEN_ID)]


Seconds = Annotated[Float, Field(ge=0)]


def _is_absent(value: object) -> bool:
    """Whether to omit a field from JSON: an unset field is left out, not written as null."""
    return value is None


class WeightsId(Wire):
    """Identity of a set of weights; (0, 0) is the model's own checkpoint."""

    epoch: Identity
    version: Identity

    def as_tuple(self) -> tuple[int, int]:
        """Return `(epoch, version)`, the order of identities."""
        return (self.epoch, self.version)

    def __lt__(self, other: WeightsId) -> bool:
        return self.as_tuple() < other.as_tuple()

    def __le__(self, other: WeightsId) -> bool:
        return self.as_tuple() <= other.as_tuple()

    def __gt__(self, other: WeightsId) -> bool:
        return self.as_tuple() > other.as_tuple()

    def __ge__(self, other: WeightsId) -> bool:
        return self.as_tuple() >= other.as_tuple()

    def __str__(self) -> str:
        return f"({self.epoch}, {self.version})"


CHECKPOINT = WeightsId(epoch=0, version=0)


class StopReason(StrEnum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class AbortReason(StrEnum):
    """What ended an aborted output."""

    CLIENT = "client"
    CONTROL = "control"
    WEIGHTS = "weights"
    SLEEP = "sleep"
    DEADLINE = "deadline"
    ENGINE = "engine"


NOT_FINITE = "not-finite"
"""`abort_slug` of an output whose weights gave logits from which nothing can be sampled."""


class Lifecycle(StrEnum):
    """State of a worker; `core/lifecycle_states.py` holds the table of allowed moves."""

    STARTING = "Starting"
    LOADING = "Loading"
    ACTIVE = "Active"
    PAUSING = "Pausing"
    PAUSED = "Paused"
    DRAINING = "Draining"
    ASLEEP = "Asleep"
    WAKING = "Waking"
    FAILED = "Failed"


LogprobsOf = Literal["sampling", "raw"]


InFlightPolicy = Literal["Drain", "Abort", "Keep", "Recompute", "Pin"]


OnDeadline = Literal["Abort", "Keep"]


MemoryTag = Literal["weights", "kv_cache"]


class Problem(BaseModel):
    """An `application/problem+json` error (RFC 9457); extension members carry machine-readable facts."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(description="urn:rollout:problem:<slug>")
    title: str
    status: int
    detail: str = Field(description="What happened and how to fix it.")


class Progress(Wire):
    """What a worker that is not serving yet is doing."""

    message: str
    fraction: float | None = Field(default=None, ge=0, le=1)
