"""Messages as chat templates expect them: plain dicts, media extracted, calls parsed."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

Message = dict[str, Any]
MediaLists = dict[str, list[Any]]

STAND_IN = re.compile(
    r"zqx(?:ask|form|given|got|key|name|next\d+|reply|said|system|tool)zqx|zqxcall01"
)
"""Words that stand for contents while a template is tried: never sent, never kept."""

MediaKind = Literal["image", "video", "audio"]
MEDIA_KEYS: tuple[str, ...] = ("image", "video", "audio")
_MEDIA_TYPES = {
    **{key: key for key in MEDIA_KEYS},
    **{f"{key}_url": key for key in MEDIA_KEYS},
    "input_image": "image",
    "input_video": "video",
    "input_audio": "audio",
}


class ToolResponse(BaseModel):
    """What a tool returned: text, and media in the order in which the model sees them.

    `name` and `tool_call_id` identify the call that it answers; some templates print them.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
    audio: list[Any] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    @field_validator(*MEDIA_KEYS, mode="before")
    @classmethod
    def _check_list(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError(
                f"{info.field_name} must be a list: write {{{info.field_name!r}: [item]}}"
            )
        return value

    def is_empty(self) -> bool:
        """Return whether there is neither text nor media."""
        return not self.text and not any(getattr(self, key) for key in MEDIA_KEYS)

    def message(self) -> tuple[Message, MediaLists]:
        """Return the message of role `tool` and its media, placeholders before the text."""
        media: MediaLists = {key: list(getattr(self, key) or ()) for key in MEDIA_KEYS}
        content: Any = self.text or ""
        if any(media.values()):
            content = [{"type": key} for key in MEDIA_KEYS for _ in media[key]]
            content += [{"type": "text", "text": self.text}] if self.text else []
        names = {"name": self.name, "tool_call_id": self.tool_call_id}
        found = {"role": "tool", "content": content}
        return found | {k: v for k, v in names.items() if v is not None}, media

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return a response given as such, or as text, a mapping, or a model with its fields."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(text=value)
        return cls.model_validate(plain_mapping(value))


def plain_mapping(value: Any) -> Any:
    """Return a message or tool as a plain mapping, with models converted to dicts."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {
            key: item.model_dump(exclude_none=True) if isinstance(item, BaseModel) else item
            for key, item in value.items()
        }
    raise TypeError(f"a message must be a mapping or a model, not {type(value).__name__!r}")


def extract_media(value: Any) -> tuple[Message, MediaLists]:
    """Return a message as a plain dict, and the media from its content.

    Media become placeholders (`{"type": "image"}`); existing placeholders stay.
    """
    message: Message = plain_mapping(value)
    if not isinstance(message.get("role"), str):
        raise ValueError(f"message without a role: {sorted(message)}")
    message.setdefault("content", "")
    media: MediaLists = {key: [] for key in MEDIA_KEYS}
    if isinstance(message["content"], Sequence) and not isinstance(message["content"], str):
        items = map(plain_mapping, message["content"])
        message["content"] = [_extract_item(item, media) for item in items]
    check_stand_in_words(message)
    calls = message.pop("tool_calls", None)
    if calls:  # no empty list: some templates only check that the key exists
        message["tool_calls"] = [parse_tool_call(call) for call in calls]
    return message, media


def check_stand_in_words(message: Message) -> None:
    """Raise ValueError if a message holds a stand-in's word."""
    if found := STAND_IN.search(str(message["content"])):
        raise ValueError(
            f"a message of role {message['role']!r} holds {found[0]!r}, with which chat templates "
            "are tried in place of contents: change that word"
        )


def _extract_item(item: Message, media: MediaLists) -> Message:
    kind = str(item.get("type"))
    key = _MEDIA_TYPES.get(kind, "")
    payload = item.get(kind, item.get(key))
    if not key or payload is None:
        return item
    media[key].append(payload)
    return {"type": key}


def parse_tool_call(call: Any) -> Message:
    """Return a call in OpenAI's format, with its arguments parsed, as templates expect them."""
    found: Message = plain_mapping(call)
    if "function" not in found:
        return found
    function = plain_mapping(found["function"])
    if isinstance(function.get("arguments"), str):
        # Arguments that are not JSON are printed as they are.
        with contextlib.suppress(json.JSONDecodeError):
            function["arguments"] = json.loads(function["arguments"])
    return {**found, "type": found.get("type", "function"), "function": function}
