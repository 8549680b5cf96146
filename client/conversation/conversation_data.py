"""A conversation's data, and how to read, serialize and restore it: no template, no tokenizer."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout_common.wire import LogprobsOf, WeightsId, WeightsSpan

from .columns import ColumnView, TokenColumns
from .media import MediaTurn, SerializableData, equal_values, join_media
from .sanity_check import SanityCheckMode
from .template_messages import MEDIA_KEYS, MediaKind

CounterName = Literal[
    "full_renders", "history_rewrites", "seam_merges", "regroups",
    "boundary_tokens_added", "boundary_tokens_removed",
]  # fmt: skip


class RequestState(StrEnum):
    """State of a conversation."""

    PENDING = "pending"
    RUNNING = "running"
    TOOL_CALLING = "tool_calling"
    COMPLETED = "completed"
    FAILED = "failed"


class FinishReason(StrEnum):
    """Why a conversation ended; `tool_calls` ends a turn, never a conversation."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    TOOL_CALLS = "tool_calls"


class OverlongPrompt(StrEnum):
    """What to do with a prompt that is too long."""

    ERROR = "error"
    TRUNCATE_LEFT = "truncate_left"
    TRUNCATE_MIDDLE = "truncate_middle"


class WriteCursor(BaseModel):
    """Where the next turn goes.

    Attributes:
        tokens: Length up to the last assistant turn (or the prompt), without its closing tokens.
        messages: Number of messages up to there.
        opened: Number of tokens in an open generation prompt at the end.
        sampled: The policy sampled the last answer.
        unclosed: Nothing follows that answer yet: the next turn must close it first.
        stopped: The token id that stopped the policy, if the engine reported one.
    """

    tokens: int = 0
    messages: int = 0
    opened: int = 0
    sampled: bool = False
    unclosed: bool = False
    stopped: int | None = None


class ConversationData(BaseModel):
    """The data of a `Conversation`; JSON and msgpack round trips keep all of it."""

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, ser_json_inf_nan="constants"
    )

    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    batch_data_id: int = 0
    rollout_offset: int = 0
    state: RequestState = RequestState.PENDING
    messages: SerializableData = Field(description="Plain dicts, media replaced by placeholders.")
    tool_schemas: SerializableData = Field(default_factory=list)
    tools_kwargs: SerializableData = Field(default_factory=dict)
    chat_template_kwargs: SerializableData = Field(default_factory=dict)
    multi_modal_keys: tuple[MediaKind, ...] = Field(
        default=get_args(MediaKind),
        description="Kinds of media that it may hold; others are refused.",
    )
    multi_modal_data: SerializableData = Field(default_factory=dict)
    mm_processor_kwargs: SerializableData = Field(default_factory=dict)
    max_prompt_len: int = Field(gt=0)
    max_response_len: int = Field(default=8192, ge=0)
    max_model_len: int = Field(default=32768, gt=0)
    overlong_prompt: OverlongPrompt = OverlongPrompt.ERROR
    tokenization_sanity_check_mode: SanityCheckMode = SanityCheckMode.STRICT
    use_inference_chat_template: bool = Field(
        default=False, description="Engines get the template's full render, not the ids kept here."
    )
    streams: TokenColumns = Field(default_factory=TokenColumns)
    media: list[MediaTurn] = Field(default_factory=list)
    logprobs_of: LogprobsOf | None = None
    reward_scores: dict[str, list[float]] = Field(default_factory=dict)
    finish_reason: FinishReason | None = None
    truncated_tokens: int = 0
    metrics: SerializableData = Field(default_factory=dict)
    counters: dict[CounterName, int] = Field(default_factory=dict)
    difference: str | None = Field(default=None, description="What the sanity check found.")
    error: str | None = Field(default=None, description="Why the conversation failed.")
    prompt_cut: tuple[int, int] | None = Field(
        default=None, description="Start and count of the ids that truncation cut from the prompt."
    )
    cursor: WriteCursor = Field(default_factory=WriteCursor)

    @model_validator(mode="after")
    def _fit_fields(self) -> Self:
        self.multi_modal_data = {**{key: [] for key in MEDIA_KEYS}, **self.multi_modal_data}
        self.check_media_kinds(self.multi_modal_data)
        if self.use_inference_chat_template and self.overlong_prompt is not OverlongPrompt.ERROR:
            raise ValueError(
                f"overlong_prompt is {self.overlong_prompt.value!r}: a cut prompt can't be rendered "
                "again at each turn, so use 'error' with use_inference_chat_template"
            )
        return self

    def __eq__(self, other: object) -> bool:
        """Compare the data alone: a conversation may or may not have loaded its template."""
        return type(self) is type(other) and equal_values(vars(self), vars(other))

    __hash__ = None  # type: ignore[assignment]

    # Reading. Ids are int32, masks int8, logprobs float32; each is a view of its column.

    @property
    def input_ids(self) -> ColumnView[int]:
        """Ids of prompt and response [N]."""
        return self.streams.column_view("ids")

    @property
    def prompt_ids(self) -> ColumnView[int]:
        """Ids of the prompt [P], including its generation prompt."""
        return self.streams.column_view("ids", 0, self.streams.prompt)

    @property
    def response_ids(self) -> ColumnView[int]:
        """Ids after the prompt [R]: answers, and the turns of users and tools between them."""
        return self.streams.column_view("ids", self.streams.prompt)

    @property
    def attention_mask(self) -> list[int]:
        """All 1 [N]: only a batch is padded."""
        return [1] * len(self.streams)

    @property
    def position_ids(self) -> tuple[Sequence[int], ...]:
        """One row of positions, or three (time, height, width) with a Qwen-VL processor [1|3, N]."""
        return self.streams.position_rows()

    @property
    def response_position_ids(self) -> tuple[Sequence[int], ...]:
        """The response's part of `position_ids` [1|3, R]."""
        return self.streams.position_rows(self.streams.prompt)

    @property
    def loss_mask(self) -> ColumnView[int]:
        """1 for every token of an answer, sampled or given as text [N]."""
        return self.streams.column_view("loss")

    @property
    def response_loss_mask(self) -> ColumnView[int]:
        """The response's part of `loss_mask` [R]."""
        return self.streams.column_view("loss", self.streams.prompt)

    @property
    def response_mask(self) -> ColumnView[int]:
        """1 for the response tokens that the policy sampled [R], which have a logprob."""
        return self.streams.column_view("sampled", self.streams.prompt)

    @property
    def rollout_log_probs(self) -> ColumnView[float]:
        """Logprobs of the response [R], of kind `logprobs_of`; 0.0 where not sampled."""
        return self.streams.column_view("logprobs", self.streams.prompt)

    @property
    def weights(self) -> tuple[WeightsSpan, ...]:
        """Which weights sampled which tokens; `start` and `end` index into `input_ids`."""
        return tuple(self.streams.weights)

    @property
    def weights_range(self) -> tuple[WeightsId, WeightsId] | None:
        """The oldest and newest weights that sampled here; None: no engine reported them."""
        found = [WeightsId(epoch=s.epoch, version=s.version) for s in self.streams.weights]
        return (min(found), max(found)) if found else None

    @property
    def multi_modal_inputs(self) -> dict[str, Any]:
        """Tensors of all media, joined on their first axis."""
        return join_media(self.media)

    @property
    def budget(self) -> int:
        """How many tokens the policy may still sample before a limit cuts them."""
        response, length = len(self.response_ids), len(self.streams)
        return max(0, min(self.max_response_len - response, self.max_model_len - length))

    def check_media_kinds(self, media: Mapping[str, Sequence[Any]]) -> None:
        """Refuse media of a kind that is not in `multi_modal_keys`."""
        odd = [key for key, items in media.items() if items and key not in self.multi_modal_keys]
        if odd:
            raise ValueError(
                f"multi_modal_keys: has no {odd[0]!r}, of which there are media: add it"
            )

    def update_metrics(self, metrics: Any, tool_id: str) -> None:
        """Append a tool's metrics to its list."""
        self.metrics.setdefault(tool_id, []).append(metrics)

    # Serialization.

    def to_msgpack(self) -> bytes:
        """Serialize to msgpack, with columns and tensors as raw bytes.

        Raises:
            ImportError: msgpack is not installed (extra `client`).
        """
        import msgpack

        packed: bytes = msgpack.packb(self.model_dump(context={"binary": True}), datetime=False)
        return packed

    @classmethod
    def from_msgpack(cls, data: bytes) -> Self:
        """Restore what `to_msgpack` wrote.

        Raises:
            ValueError: The bytes are something else.
        """
        import msgpack

        return cls.model_validate(msgpack.unpackb(data, strict_map_key=False))
