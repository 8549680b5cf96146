"""Wire models of the worker: the one source for its OpenAPI, the client and the operator.

Every model is frozen and refuses unknown fields. Times are in seconds, ids are token ids of the
served model's tokenizer, and weights are identified by `WeightsId` (epoch, version), ordered
lexicographically. This module imports neither torch nor a web framework.

`RolloutRequest` and the other names of `rollout_client.conversation` stay importable from here.
They are loaded on first use, because the worker must run without the trainer's library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .wire.control_models import (
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
from .wire.weights_models import (
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
from .wire.wire_base import (
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

if TYPE_CHECKING:
    from rollout_client.conversation import (
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
    """Load a name of `rollout_client.conversation`, which imports this module.

    Raises:
        ImportError: The packages that the client needs are not installed.
    """
    if name not in _CONVERSATION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("rollout_client.conversation"), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} is a part of the client, which needs {error.name!r}: "
            "pip install 'rollout-operator[client]'"
        ) from error
