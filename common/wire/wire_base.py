"""The building blocks of every wire model: strict scalars, bounded lists, identities of weights, enumerations."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticKnownError

__all__ = [
    "CHECKPOINT",
    "GRAMMAR_FAILED",
    "MAX_IDENTITY",
    "MAX_TOKEN_ID",
    "NOT_FINITE",
    "AbortReason",
    "Bool",
    "Float",
    "Identity",
    "InFlightPolicy",
    "Int",
    "Lifecycle",
    "LogprobsOf",
    "MemoryTag",
    "OnDeadline",
    "Problem",
    "Progress",
    "Seconds",
    "StopReason",
    "TokenId",
    "WeightsId",
    "Wire",
]

MAX_IDENTITY = 2**53 - 1
"""Largest epoch or version: the largest integer that JSON numbers represent exactly."""
MAX_TOKEN_ID = 2**31 - 1
"""Largest token id that engines can store; real vocabularies are far smaller."""


class Wire(BaseModel):
    """Base of everything that crosses a process boundary."""

    model_config = ConfigDict(extra="forbid", frozen=True)


MAX_UNKNOWN = 64
"""Unknown fields that are reported or ignored one by one; a body with more of them is refused as a whole."""


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
    def _refuse_many_fields(cls, given: Any) -> Any:
        return refuse_many_unknown(cls, given)


# JSON tells numbers, booleans and strings apart; a client that mixes them up has a bug to find.
Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
Identity = Annotated[Int, Field(ge=0, le=MAX_IDENTITY)]
TokenId = Annotated[Int, Field(ge=0, le=MAX_TOKEN_ID)]
Seconds = Annotated[Float, Field(ge=0)]


SLICE_LENGTH = 2**14
"""Elements of a list that are validated at once, which takes about a millisecond."""


def bounded_length(most: int) -> WrapValidator:
    """Validate a list or a mapping of at most `most` elements, in steps and only up to the first bad element.

    Between two steps the event loop gets its turn, wherever the validation runs.
    """

    def validate_bounded_value(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, list | dict) or len(value) <= 1:
            return handler(value)
        if len(value) > most:
            kind = "Dictionary" if isinstance(value, dict) else "List"
            sizes = {"field_type": kind, "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", sizes)
        if isinstance(value, dict):
            return _validate_mapping(value, handler)
        return handler(value) if len(value) <= SLICE_LENGTH else _validate_slices(value, handler)

    return WrapValidator(validate_bounded_value)


def _validate_mapping(
    value: dict[Any, Any], handler: ValidatorFunctionWrapHandler
) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, each in value.items():
        found.update(handler({key: each}))
    return found


def _validate_slices(value: list[Any], handler: ValidatorFunctionWrapHandler) -> Any:
    found: list[Any] = []
    for start in range(0, len(value), SLICE_LENGTH):
        try:
            found += (part := handler(value[start : start + SLICE_LENGTH]))
        except ValidationError as error:
            first = error.errors()[0]  # without a bad element, a tuple may be too short as well
            raise ValidationError.from_exception_data(
                error.title, [_shift_error(first, start)]
            ) from None
    return type(part)(found)


def _shift_error(error: Any, start: int) -> InitErrorDetails:
    """Return an error of a slice with the index that its element has in the whole list."""
    index, *rest = error["loc"]
    return InitErrorDetails(
        type=error["type"],
        loc=(start + index, *rest),
        input=error["input"],
        ctx=error.get("ctx", {}),
    )


def _is_absent(value: object) -> bool:
    """Whether to leave a field out of JSON, instead of writing null."""
    return value is None


def omittable_field(description: str | None = None, **bounds: Any) -> Any:
    """Return a field that JSON leaves out where it is None."""
    return Field(default=None, exclude_if=_is_absent, description=description, **bounds)


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


class Identified(Wire):
    """A model that names a version of the weights."""

    epoch: Identity
    version: Identity

    @property
    def identity(self) -> WeightsId:
        """The identity alone."""
        return _make_identity(self.epoch, self.version)


@lru_cache(maxsize=1024)
def _make_identity(epoch: int, version: int) -> WeightsId:
    """Return the same object for the same numbers: thousands of workers have few versions."""
    return WeightsId(epoch=epoch, version=version)


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


GRAMMAR_FAILED = "grammar-failed"
"""`abort_slug` of an output whose grammar became too large to follow."""

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
