"""Wire models of the worker: the one source for its OpenAPI, the client and the operator.

Every model is frozen and refuses unknown fields. Times are in seconds, ids are token ids of the
served model's tokenizer, and weights are identified by `WeightsId` (epoch, version), ordered
lexicographically. This module imports neither torch nor a web framework.

The request of a whole conversation, `RolloutRequest`, and what belongs to it are imported from
here, too; they live in `conversation/` and are loaded when first asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

if TYPE_CHECKING:
    from .conversation import Difference as Difference
    from .conversation import FinishReason as FinishReason
    from .conversation import OverlongPrompt as OverlongPrompt
    from .conversation import PromptTooLong as PromptTooLong
    from .conversation import RequestState as RequestState
    from .conversation import RolloutBatch as RolloutBatch
    from .conversation import RolloutRequest as RolloutRequest
    from .conversation import SanityCheckMode as SanityCheckMode
    from .conversation import TemplateError as TemplateError
    from .conversation import ToolResponse as ToolResponse
    from .conversation import from_batch as from_batch
    from .conversation import to_batch as to_batch

MAX_IDENTITY = 2**53 - 1
"""Largest epoch or version: what a JSON number keeps exactly."""

MAX_TOKEN_ID = 2**31 - 1
"""Largest token id that engines can hold; each model's vocabulary is far smaller."""

MAX_BATCH_N = 128
"""Largest `n` of one request."""


class Wire(BaseModel):
    """Base of everything that crosses a process border."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# JSON has numbers, booleans and strings; a client that mixes them up has a mistake to find.
Int = Annotated[int, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]

Identity = Annotated[Int, Field(ge=0, le=MAX_IDENTITY)]
TokenId = Annotated[Int, Field(ge=0, le=MAX_TOKEN_ID)]
Seconds = Annotated[Float, Field(ge=0)]


def _token_key(key: object) -> object:
    """Keys of JSON objects are strings: take decimal digits, nothing that merely looks like them."""
    if isinstance(key, str) and re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
        return int(key)
    return key


TokenKey = Annotated[TokenId, BeforeValidator(_token_key)]


def _absent(value: object) -> bool:
    """Whether a field is left out of JSON: what was not given is not shown as null."""
    return value is None


class WeightsId(Wire):
    """Identity of weights; (0, 0) is the model's own checkpoint."""

    epoch: Identity
    version: Identity

    def as_tuple(self) -> tuple[int, int]:
        """Return `(epoch, version)`, which orders identities."""
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


class Checkpoint(Wire):
    """The model's own checkpoint, named as a source (going back)."""


class WeightsSource(Wire):
    """Where the bytes of a version are; exactly one field is set."""

    path: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        exclude_if=_absent,
        description="Folder or file of safetensors below the model's or the weights' mount.",
    )
    checkpoint: Checkpoint | None = Field(
        default=None, exclude_if=_absent, description="The model's own checkpoint."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.path is None) == (self.checkpoint is None):
            raise ValueError("give exactly one of source.path and source.checkpoint")
        return self


class StopReason(StrEnum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class AbortReason(StrEnum):
    """Who or what ended an aborted output."""

    CLIENT = "client"
    CONTROL = "control"
    WEIGHTS = "weights"
    SLEEP = "sleep"
    DEADLINE = "deadline"
    ENGINE = "engine"


class Lifecycle(StrEnum):
    """State of a worker; `lifecycle.py` holds the table of allowed moves."""

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


class SamplingParams(Wire):
    """How tokens are drawn; the defaults sample the model's own distribution.

    Order of application (vLLM's): allowed ids and logit bias, penalties, `min_tokens` (EOS and
    stop ids masked), temperature, `min_p`, `top_k`, `top_p`.
    """

    max_tokens: Int | None = Field(default=None, ge=1, description="None: up to max length.")
    min_tokens: Int = Field(default=0, ge=0)
    temperature: Float = Field(default=1.0, ge=0, le=100)
    top_p: Float = Field(default=1.0, gt=0, le=1)
    top_k: Int = Field(default=0, ge=0, le=MAX_TOKEN_ID, description="0: all.")
    min_p: Float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: Float = Field(default=1.0, gt=0, le=10)
    presence_penalty: Float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: Float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Mapping[TokenKey, Float] = Field(default_factory=dict)
    allowed_token_ids: tuple[TokenId, ...] | None = Field(default=None, min_length=1)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=256)
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        default=(), max_length=16
    )
    ignore_eos: Bool = False
    seed: Int | None = Field(default=None, ge=0, le=2**63 - 1)
    n: Int = Field(default=1, ge=1, le=MAX_BATCH_N)

    @field_validator("min_tokens")
    @classmethod
    def _within_max_tokens(cls, value: int, info: ValidationInfo) -> int:
        most = info.data.get("max_tokens")
        if most is not None and value > most:
            raise ValueError("above max_tokens: lower it, or raise max_tokens")
        return value


class GenerateRequest(Wire):
    """Body of `POST /v1/generate`: one prompt of token ids."""

    request_id: str | None = Field(
        default=None, min_length=1, max_length=256, description="None: the worker makes one."
    )
    session_id: str | None = Field(default=None, min_length=1, max_length=256)
    token_ids: tuple[TokenId, ...] = Field(min_length=1)
    sampling: SamplingParams = SamplingParams()
    logprobs: Literal["sampling", "raw", "none"] | None = Field(
        default=None, description="None: the pool's kind; 'none' leaves them out."
    )
    epoch: Identity | None = Field(
        default=None, description="Epoch of the version bounds; None: the active one."
    )
    min_version: Identity | None = None
    exact_version: Identity | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    priority: Int = Field(default=0, ge=-(2**31), le=2**31 - 1, description="Lower runs first.")
    deadline_seconds: Float = Field(default=600, gt=0, le=86400)
    stream: Bool = False


class StopMatch(Wire):
    """What completed a `stop`: an id (EOS or stop id) or a stop string; the other is left out."""

    token_id: TokenId | None = Field(default=None, exclude_if=_absent)
    text: str | None = Field(default=None, exclude_if=_absent)


class WeightsSpan(Wire):
    """Tokens `[start, end)` of an output were made by a forward pass of these weights."""

    epoch: Identity
    version: Identity
    start: int = Field(ge=0)
    end: int = Field(ge=0)
    stale_kv: bool = Field(default=False, description="KV of older weights was reused.")


class GenerateOutput(Wire):
    """One sampled continuation: token_ids [T], logprobs [T] natural log, float32 precision.

    `logprobs` is left out if the request wants none.
    """

    index: int = Field(ge=0)
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[Float, ...] | None = Field(default=None, exclude_if=_absent)
    stop_reason: StopReason
    stop_match: StopMatch | None = None
    abort_reason: AbortReason | None = None
    weights: tuple[WeightsSpan, ...]


class Usage(Wire):
    """Token counts of a request; `cached_tokens` of the prompt came from a prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Timing(Wire):
    """Where a request's time went, in seconds."""

    queued_seconds: Seconds
    first_token_seconds: Seconds | None = None
    total_seconds: Seconds
    preemptions: int = 0


class GenerateResponse(Wire):
    """Answer of `POST /v1/generate`."""

    request_id: str
    logprobs_of: Literal["sampling", "raw"] | None
    outputs: tuple[GenerateOutput, ...]
    usage: Usage
    timing: Timing


class StreamDelta(Wire):
    """Event `delta` of a stream; spans count from the output's first token."""

    index: int
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[Float, ...] | None = Field(default=None, exclude_if=_absent)
    weights: tuple[WeightsSpan, ...]


class DoneOutput(Wire):
    """An output without its arrays, as in event `done`."""

    index: int
    stop_reason: StopReason
    stop_match: StopMatch | None = None
    abort_reason: AbortReason | None = None


class StreamDone(Wire):
    """Event `done` of a stream: the answer without its arrays."""

    request_id: str
    logprobs_of: Literal["sampling", "raw"] | None
    outputs: tuple[DoneOutput, ...]
    usage: Usage
    timing: Timing


class Problem(BaseModel):
    """An `application/problem+json` error (RFC 9457); extensions carry machine-readable facts."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(description="urn:rollout:problem:<slug>")
    title: str
    status: int
    detail: str = Field(description="What happened and what to do.")


SAMPLING_FIELDS = tuple(
    sorted(SamplingParams.model_fields.keys() - {"max_tokens", "n", "seed", "stop"})
)
"""Fields of `sampling` that an engine has to know by itself."""


class Capabilities(Wire):
    """What the engine can do; what it can't is refused (422, names the field), never ignored."""

    logprobs: tuple[LogprobsOf, ...] = Field(
        description="Kinds it records. Either kind is served where both are the same numbers."
    )
    sampling: tuple[str, ...] = Field(
        default=SAMPLING_FIELDS, description="Fields of `sampling` that it applies."
    )
    sampling_logprobs: tuple[str, ...] = Field(
        default=SAMPLING_FIELDS,
        description="Fields of `sampling` that may differ from their defaults where logprobs of"
        " kind `sampling` are asked for.",
    )
    seed: bool = Field(description="Equal seeds draw equal tokens, whatever runs beside them.")
    priority: bool = Field(description="Requests of lower `priority` start first.")
    stop_strings: bool = Field(description="It finds `sampling.stop` in the text.")
    in_flight: tuple[InFlightPolicy, ...] = Field(
        description="What a commit may do to running requests; `Drain` and `Abort` always."
    )
    sleep_levels: tuple[Literal[1, 2], ...] = Field(description="Empty: it can't sleep.")
    memory_release: bool = Field(description="Sleep gives memory back to the machine.")
    prefix_cache: bool = Field(description="Prompts reuse the KV of equal prefixes.")
    cache_salt: bool = Field(description="`cache_salt` keeps requests' prefixes apart.")
    chat: bool = Field(default=False, description="The model has a chat template.")
    tool_parser: str | None = Field(
        default=None, description="Format in which tool calls are found; None: they stay text."
    )


class WorkerInfo(Wire):
    """Answer of `GET /v1/info`."""

    api: Literal["v1"] = "v1"
    engine: str
    engine_version: str
    model: str
    max_length: int
    capabilities: Capabilities


class StagedWeights(Wire):
    """The staging slot, as `POST /v1/weights/stage` and `GET /v1/weights` report it."""

    epoch: Identity
    version: Identity
    source: WeightsSource
    phase: Literal["Staging", "Staged", "Failed"]
    bytes_done: int = 0
    bytes_total: int = 0
    root_hash: str | None = None
    labels: Mapping[str, str] = Field(default_factory=dict)
    error: str | None = Field(default=None, description="Names the tensor or file and the fix.")


class ActiveWeights(Wire):
    """Weights that serve, or served before the last commit."""

    epoch: Identity
    version: Identity
    root_hash: str | None = None
    labels: Mapping[str, str] = Field(default_factory=dict)

    @property
    def identity(self) -> WeightsId:
        """The identity without content."""
        return WeightsId(epoch=self.epoch, version=self.version)


class WeightsState(Wire):
    """Answer of `GET /v1/weights` and part of `/v1/state`."""

    active: ActiveWeights | None = Field(description="None until a model is loaded.")
    previous: ActiveWeights | None = None
    staged: StagedWeights | None = None
    required: WeightsId | None = Field(
        default=None, description="Floor of `POST /v1/require`; None: none arrived in this process."
    )
    fence_epoch: Identity = Field(
        default=0, description="Stage and commit of lower epochs are refused (`stale-epoch`)."
    )
    commit_seq: int = 0


class Resident(Wire):
    """Which memory the engine holds."""

    weights: bool
    kv_cache: bool


class Hold(Wire):
    """A live hold: the effective state is the most restrictive of all."""

    holder: str
    state: Literal["Paused", "Asleep"]
    ttl: Seconds | None = Field(default=None, description="Seconds left; None: for ever.")


class Progress(Wire):
    """What a worker that is not serving yet is doing."""

    message: str
    fraction: float | None = Field(default=None, ge=0, le=1)


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


class StageRequest(Wire):
    """Body of `POST /v1/weights/stage`."""

    epoch: Identity
    version: Identity
    source: WeightsSource
    root_hash: str | None = Field(default=None, max_length=128)
    labels: Mapping[Annotated[str, Field(max_length=63)], Annotated[str, Field(max_length=256)]] = (
        Field(default_factory=dict, max_length=32)
    )
    deadline_seconds: Float = Field(default=600, gt=0, le=86400)


class CommitRequest(Wire):
    """Body of `POST /v1/weights/commit`."""

    epoch: Identity
    version: Identity
    root_hash: str | None = Field(default=None, max_length=128)
    in_flight: InFlightPolicy = "Drain"
    deadline_seconds: Float = Field(default=30, ge=0, le=86400)
    on_deadline: OnDeadline = "Abort"


class CommitResponse(Wire):
    """What a commit did; `pause_seconds` is the time in which no token could be made."""

    active: ActiveWeights
    previous: ActiveWeights | None
    commit_seq: int
    pause_seconds: Seconds
    finished: int = Field(description="Running requests that ended within the drain.")
    aborted: int
    kept: int


class DiscardRequest(Wire):
    """Body of `POST /v1/weights/discard`."""

    epoch: Identity
    version: Identity


class DiscardResponse(Wire):
    """Whether the slot held that identity; discarding what is not there is no error."""

    outcome: Literal["discarded", "unchanged"]


class RequireRequest(Wire):
    """Body of `POST /v1/require`: lifts the fence, raises the epoch and the floor of admission.

    Stage and commit of an epoch below `epoch` are refused from then on (`stale-epoch`). With
    `min_version` the worker serves only at or above (epoch, min_version). Without it the floor and
    the fence of a fresh process stay as they are: the operator shuts out a dead trainer that way
    while the old weights go on serving.
    """

    epoch: Identity
    min_version: Identity | None = None


Json = dict[str, Any]

_CONVERSATION = frozenset(
    {
        *("Difference", "FinishReason", "OverlongPrompt", "PromptTooLong", "RequestState"),
        *("RolloutBatch", "RolloutRequest", "SanityCheckMode", "TemplateError", "ToolResponse"),
        *("from_batch", "to_batch"),
    }
)


def __getattr__(name: str) -> Any:
    """Load what belongs to conversations: it needs the models above."""
    if name in _CONVERSATION:
        return getattr(import_module(f"{__package__}.conversation"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
