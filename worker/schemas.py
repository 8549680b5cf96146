"""Wire models of the worker: the one source for its OpenAPI, the client and the operator.

Every model is frozen and refuses unknown fields. Times are in seconds, ids are token ids of the
served model's tokenizer, and weights are identified by `WeightsId` (epoch, version), ordered
lexicographically. This module imports neither torch nor a web framework.

The request of a whole conversation, `RolloutRequest`, and what belongs to it are imported from
here, too; they live in `conversation/` and are loaded when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .wire.base import (
    CHECKPOINT,
    MAX_IDENTITY,
    MAX_TOKEN_ID,
    NOT_FINITE,
    AbortReason,
    Bool,
    Float,
    Identity,
    InFlightPolicy,
    Int,
    Lifecycle,
    LogprobsOf,
    MemoryTag,
    OnDeadline,
    Problem,
    Progress,
    Seconds,
    StopReason,
    TokenId,
    WeightsId,
    Wire,
)
from .wire.control import (
    AbortRequest,
    AbortResponse,
    Committed,
    Hold,
    PauseRequest,
    ReleaseRequest,
    ResetRequest,
    Resident,
    SleepRequest,
    TurnState,
    WakeRequest,
    WorkerState,
)
from .wire.generate import (
    MAX_BATCH_N,
    SAMPLING_FIELDS,
    Capabilities,
    DoneOutput,
    GenerateOutput,
    GenerateRequest,
    GenerateResponse,
    SamplingParams,
    StopMatch,
    StreamDelta,
    StreamDone,
    Timing,
    TokenKey,
    Usage,
    WeightsSpan,
    WorkerInfo,
)
from .wire.weights import (
    CASTABLE,
    ActiveWeights,
    Base,
    Checkpoint,
    CommitRequest,
    CommitResponse,
    DiscardRequest,
    DiscardResponse,
    KeptWeights,
    OfferRequest,
    OfferResponse,
    Peer,
    Pushed,
    PushedBytes,
    RequireRequest,
    StagedWeights,
    StageRequest,
    StageSource,
    Transfer,
    WeightsDtypes,
    WeightsSource,
    WeightsState,
)

if TYPE_CHECKING:
    from .conversation import (
        Difference,
        FinishReason,
        OverlongPrompt,
        PromptTooLong,
        RequestState,
        RolloutBatch,
        RolloutRequest,
        SanityCheckMode,
        TemplateError,
        ToolResponse,
        from_batch,
        to_batch,
    )

__all__ = [
    "CASTABLE",
    "CHECKPOINT",
    "MAX_BATCH_N",
    "MAX_IDENTITY",
    "MAX_TOKEN_ID",
    "NOT_FINITE",
    "SAMPLING_FIELDS",
    "AbortReason",
    "AbortRequest",
    "AbortResponse",
    "ActiveWeights",
    "Base",
    "Bool",
    "Capabilities",
    "Checkpoint",
    "CommitRequest",
    "CommitResponse",
    "Committed",
    "Difference",
    "DiscardRequest",
    "DiscardResponse",
    "DoneOutput",
    "FinishReason",
    "Float",
    "GenerateOutput",
    "GenerateRequest",
    "GenerateResponse",
    "Hold",
    "Identity",
    "InFlightPolicy",
    "Int",
    "KeptWeights",
    "Lifecycle",
    "LogprobsOf",
    "MemoryTag",
    "OfferRequest",
    "OfferResponse",
    "OnDeadline",
    "OverlongPrompt",
    "PauseRequest",
    "Peer",
    "Problem",
    "Progress",
    "PromptTooLong",
    "Pushed",
    "PushedBytes",
    "ReleaseRequest",
    "RequestState",
    "RequireRequest",
    "ResetRequest",
    "Resident",
    "RolloutBatch",
    "RolloutRequest",
    "SamplingParams",
    "SanityCheckMode",
    "Seconds",
    "SleepRequest",
    "StageRequest",
    "StageSource",
    "StagedWeights",
    "StopMatch",
    "StopReason",
    "StreamDelta",
    "StreamDone",
    "TemplateError",
    "Timing",
    "TokenId",
    "TokenKey",
    "ToolResponse",
    "Transfer",
    "TurnState",
    "Usage",
    "WakeRequest",
    "WeightsDtypes",
    "WeightsId",
    "WeightsSource",
    "WeightsSpan",
    "WeightsState",
    "Wire",
    "WorkerInfo",
    "WorkerState",
    "from_batch",
    "to_batch",
]

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
