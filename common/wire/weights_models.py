"""Wire models of weights: their source, what is staged and active, and the verbs that change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .adapters import ServedAdapter
from .wire_base import (
    Body,
    Float,
    Identified,
    Identity,
    InFlightPolicy,
    OnDeadline,
    Seconds,
    WeightsId,
    Wire,
    bounded_length,
    omittable_field,
)

__all__ = [
    "CASTABLE",
    "ActiveWeights",
    "Base",
    "Checkpoint",
    "CommitRequest",
    "CommitResponse",
    "DiscardRequest",
    "DiscardResponse",
    "KeptWeights",
    "OfferRequest",
    "OfferResponse",
    "Peer",
    "Pushed",
    "PushedBytes",
    "RequireRequest",
    "StageRequest",
    "StageSource",
    "StagedWeights",
    "Transfer",
    "WeightsDtypes",
    "WeightsSource",
    "WeightsState",
]


def _is_empty(value: tuple[object, ...]) -> bool:
    """Whether to leave a field out of JSON, instead of writing an empty list."""
    return not value


class Checkpoint(Body):
    """Names the model's own checkpoint as the source, to go back to it."""


class Pushed(Body):
    """Names the bytes that the trainer pushes to the workers, and that workers pass on, as the source."""


class SourceFields(Body):
    """What both kinds of sources share; each adds its `pushed`, and exactly one field is set."""

    path: str | None = omittable_field(
        "Folder or file of safetensors in the model's or the weights' volume; a relative path starts in the latter.",
        min_length=1,
        max_length=1024,
    )
    checkpoint: Checkpoint | None = omittable_field("The model's own checkpoint.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if sum(value is not None for _, value in self) != 1:
            raise ValueError("give exactly one of source.path, source.checkpoint and source.pushed")
        return self


class WeightsSource(SourceFields):
    """Where to read the bytes of a version; exactly one field is set."""

    pushed: Pushed | None = omittable_field(
        "What the trainer pushes to each worker; workers that have it pass it on."
    )


Ticket = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""128 random bits: a caller that shows them may use one connection to the weights' port."""


class Peer(Body):
    """A worker that gives what it keeps, as its `POST /v1/weights/offer` answered."""

    host: str = Field(min_length=1, max_length=253)
    port: int = Field(ge=1, le=65535)
    ticket: Ticket


class Base(Identified, Body):
    """The version that a delta is to be applied to: what serves, with its bytes still there."""

    root_hash: str = Field(max_length=128)


class PushedBytes(Body):
    """Bytes that come over a connection of their own; see docs/weights.md.

    Without `peers` the worker waits for a sender, with them it fetches from these workers.
    """

    layout_id: str | None = Field(
        default=None, max_length=128, description="Of the layout that must come; null: any."
    )
    bytes: int | None = Field(
        default=None, ge=0, le=1 << 48, description="How many must come, gaps included; null: any."
    )
    peers: Annotated[tuple[Peer, ...], Field(max_length=8), bounded_length(8)] = ()
    base: Base | None = omittable_field(
        "Over TCP, what differs from this version may come instead of all bytes."
    )

    @model_validator(mode="after")
    def _whole_from_peers(self) -> Self:
        if self.base is not None and self.peers:
            raise ValueError("peers give whole versions: leave base out")
        return self


class StageSource(SourceFields):
    """Where to take the bytes of a version from; exactly one field is set."""

    pushed: PushedBytes | None = omittable_field("What a sender or peers bring.")

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, given: object) -> object:
        """Accept the source as a pool's spec names it, too."""
        return dict(cls.of(given)) if isinstance(given, WeightsSource) else given

    @classmethod
    def of(cls, source: WeightsSource) -> Self:
        """Return the same source; pushed bytes come from a sender then."""
        pushed = None if source.pushed is None else PushedBytes()
        return cls(path=source.path, checkpoint=source.checkpoint, pushed=pushed)

    @property
    def without_bytes(self) -> WeightsSource:
        """The source by its name alone, as the state and a pool's spec have it."""
        if self.pushed is not None:
            return WeightsSource(pushed=Pushed())
        return WeightsSource(path=self.path, checkpoint=self.checkpoint)


class Transfer(Wire):
    """How to bring the bytes of a stage; in the answer to the call alone."""

    ticket: str = Field(description="Good for one connection, until the slot is given up.")
    port: int | None = Field(description="Of the weights, over TCP; null: the worker has none.")
    tls: bool = Field(default=False, description="Whether that port takes TLS alone.")
    socket: str | None = Field(
        default=None, description="Path of the Unix socket that takes memory; null: there is none."
    )
    node: str | None = Field(
        default=None,
        description="Boot id of the kernel, device and inode of that socket: equal for processes that reach the same socket.",
    )


ServedAdapters = Annotated[
    tuple[ServedAdapter, ...],
    Field(
        exclude_if=_is_empty,
        description="LoRA adapters of these weights, by name; omitted if there are none.",
    ),
]


class StagedWeights(Identified):
    """The staging slot, as `POST /v1/weights/stage` and `GET /v1/weights` report it."""

    source: WeightsSource
    phase: Literal["Staging", "Staged", "Failed"]
    bytes_done: int = 0
    bytes_total: int = 0
    root_hash: str | None = Field(default=None, max_length=128)
    labels: Mapping[str, str] = Field(default_factory=dict)
    adapters: ServedAdapters = ()
    error: str | None = Field(
        default=None, description="Names the tensor or file at fault, and the fix."
    )
    slug: str | None = omittable_field(
        "The problem's kind, such as `content-mismatch`, where `error` has one."
    )
    chunks: int = Field(
        default=0,
        description="Pushed chunks of 1 MiB that are there: over TCP verified, in shared memory filled; 0 for files.",
    )
    transfer: Transfer | None = omittable_field(
        "How to bring pushed bytes; only in the answer to the call that asked for them."
    )


class KeptWeights(Identified):
    """The pushed version that this worker can give to others, and load again."""

    root_hash: str = Field(max_length=128)
    bytes: int


class ActiveWeights(Identified):
    """The serving weights, or those that served before the last commit."""

    root_hash: str | None = Field(default=None, max_length=128)
    labels: Mapping[str, str] = Field(default_factory=dict)
    adapters: ServedAdapters = ()


class WeightsState(Wire):
    """Response of `GET /v1/weights`, and part of `/v1/state`."""

    active: ActiveWeights | None = Field(description="null until a model is loaded.")
    previous: ActiveWeights | None = None
    staged: StagedWeights | None = None
    required: WeightsId | None = Field(
        default=None,
        description="Floor set by `POST /v1/require`; null: not set in this process yet.",
    )
    fence_epoch: Identity = Field(
        default=0, description="Stage and commit refuse lower epochs (`stale-epoch`)."
    )
    commit_seq: int = 0
    kept: KeptWeights | None = Field(
        default=None, description="Pushed bytes that `POST /v1/weights/offer` gives; null: none."
    )


CASTABLE = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes between which `publish_weights(…, cast=True)` casts."""


class WeightsDtypes(Wire):
    """Response of `GET /v1/weights/dtypes`."""

    dtypes: Mapping[str, str] = Field(
        description="By name of a tensor of the model's checkpoint: its dtype, as safetensors calls it."
    )
    root_hash: str | None = Field(
        default=None, max_length=128, description="Of the model's checkpoint."
    )


Labels = Annotated[
    Mapping[Annotated[str, Field(max_length=63)], Annotated[str, Field(max_length=256)]],
    Field(max_length=32),
    bounded_length(32),
]


class StageRequest(Identified, Body):
    """Body of `POST /v1/weights/stage`."""

    source: StageSource
    root_hash: str | None = Field(default=None, max_length=128)
    labels: Labels = Field(default_factory=dict)
    deadline_seconds: Float = Field(default=600, gt=0, le=86400)


class CommitRequest(Identified, Body):
    """Body of `POST /v1/weights/commit`."""

    root_hash: str | None = Field(default=None, max_length=128)
    in_flight: InFlightPolicy = "Drain"
    deadline_seconds: Float = Field(default=30, ge=0, le=86400)
    on_deadline: OnDeadline = "Abort"


class CommitResponse(Wire):
    """What a commit did; for `pause_seconds` the engine could not generate tokens."""

    active: ActiveWeights
    previous: ActiveWeights | None
    commit_seq: int
    pause_seconds: Seconds
    finished: int = Field(description="Running requests that completed during the drain.")
    aborted: int
    kept: int


class DiscardRequest(Identified, Body):
    """Body of `POST /v1/weights/discard`."""


class DiscardResponse(Wire):
    """Whether the slot held that identity; discarding an absent one is not an error."""

    outcome: Literal["discarded", "unchanged"]


class OfferRequest(Identified, Body):
    """Body of `POST /v1/weights/offer`."""


class OfferResponse(Wire):
    """What a peer has to know to fetch what this worker keeps: part of `source.pushed.peers`."""

    ticket: str
    port: int
    layout_id: str
    bytes: int
    root_hash: str


class RequireRequest(Body):
    """Body of `POST /v1/require`: lifts the fence, raises the epoch and the admission floor.

    From then on, stage and commit refuse epochs below `epoch` (`stale-epoch`). With `min_version`
    the worker serves only weights at or above (epoch, min_version). Without it the floor, and the
    fence of a fresh process, stay as they are: so the operator shuts out a dead trainer while the old
    weights keep serving.

    From now on, running requests get `drain_seconds` to finish when the process is asked to end.
    """

    epoch: Identity
    min_version: Identity | None = None
    drain_seconds: Float | None = Field(default=None, ge=0, le=86400)
