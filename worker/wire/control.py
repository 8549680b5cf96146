"""Wire models of the control port: the worker's state, holds, sleep and abort."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    model_validator,
)

from .base import Bool, Float, Int, Lifecycle, MemoryTag, Progress, Seconds, Wire
from .weights import WeightsState


class Resident(Wire):
    """Which memory the engine holds."""

    weights: bool
    kv_cache: bool


class Hold(Wire):
    """A live hold: the effective state is the most restrictive of all."""

    holder: str
    state: Literal["Paused", "Asleep"]
    ttl: Seconds | None = Field(default=None, description="Seconds left; None: for ever.")


class WorkerState(Wire):
    """Answer of `GET /v1/state`."""

    boot_id: str = Field(description="New with every process.")
    engine: str
    lifecycle: Lifecycle
    serving: bool = Field(description="What GET /ready says: it may serve now.")
    weights: WeightsState
    resident: Resident
    holds: tuple[Hold, ...] = ()
    caller: str = Field(
        default="", description="Holder under which the caller of this request puts its holds."
    )
    generation: int | None = Field(
        default=None, description="Highest object generation seen in an operator's call."
    )
    in_flight: int = 0
    queued: int = 0
    restarts: int = 0
    last_error: str | None = None
    progress: Progress | None = None


class PauseRequest(Wire):
    """Body of `POST /v1/pause`."""

    mode: Literal["drain", "abort", "keep"] = "drain"
    deadline_seconds: Float = Field(default=30, ge=0, le=86400)
    ttl_seconds: Float | None = Field(default=None, gt=0, le=86400)
    generation: Int | None = Field(default=None, ge=0)


class ReleaseRequest(Wire):
    """Body of `POST /v1/resume`: drops the caller's hold."""

    generation: Int | None = Field(default=None, ge=0)


def _whole(level: object) -> object:
    if type(level) is not int:  # True and 1.0 equal 1
        raise ValueError("give 1 or 2")
    return level


class SleepRequest(Wire):
    """Body of `POST /v1/sleep`."""

    level: Annotated[Literal[1, 2], BeforeValidator(_whole)] = 1
    tags: tuple[MemoryTag, ...] = Field(default=("weights", "kv_cache"), min_length=1)
    mode: Literal["drain", "abort", "keep"] = "drain"
    deadline_seconds: Float = Field(default=30, ge=0, le=86400)
    generation: Int | None = Field(default=None, ge=0)


class WakeRequest(Wire):
    """Body of `POST /v1/wake`: drops the caller's sleep hold for these tags."""

    tags: tuple[MemoryTag, ...] = Field(default=("weights", "kv_cache"), min_length=1)
    generation: Int | None = Field(default=None, ge=0)


class ResetRequest(Wire):
    """Body of `POST /v1/cache/reset`: empty."""


class AbortRequest(Wire):
    """Body of `POST /v1/abort`: some ids, or all."""

    request_ids: tuple[Annotated[str, Field(max_length=256)], ...] | None = None
    all: Bool = False

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.request_ids is None) != self.all:
            raise ValueError('give either request_ids or {"all": true}')
        return self


class AbortResponse(Wire):
    """Which requests were aborted and which ids nobody knows."""

    aborted: tuple[str, ...]
    unknown: tuple[str, ...]
