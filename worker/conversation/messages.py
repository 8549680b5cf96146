"""Messages as chat templates want them: plain dicts, media taken out, tool calls parsed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

Message = dict[str, Any]
Media = dict[str, list[Any]]

MEDIA_KEYS = ("image", "video", "audio")
_KINDS = {
    **{key: key for key in MEDIA_KEYS},
    **{f"{key}_url": key for key in MEDIA_KEYS},
    "input_image": "image",
    "input_video": "video",
    "input_audio": "audio",
}


class ToolResponse(BaseModel):
    """What a tool returned: text, and media in the order in which the model shall see them.

    `name` and `tool_call_id` say which call it answers; templates that print them need them.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
    audio: list[Any] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, values: Any) -> Any:
        for key in MEDIA_KEYS:
            found = values.get(key) if isinstance(values, dict) else None
            if found is not None and not isinstance(found, list):
                raise ValueError(f"{key} must be a list: write {{{key!r}: [item]}}")
        return values

    def is_empty(self) -> bool:
        """Return whether there is nothing in it."""
        return not self.text and not any(getattr(self, key) for key in MEDIA_KEYS)

    def message(self) -> tuple[Message, Media]:
        """Return the message of role `tool` and its media, placeholders before the text."""
        media: Media = {key: list(getattr(self, key) or ()) for key in MEDIA_KEYS}
        content: Any = self.text or ""
        if any(media.values()):
            content = [{"type": key} for key in MEDIA_KEYS for _ in media[key]]
            content += [{"type": "text", "text": self.text}] if self.text else []
        names = {"name": self.name, "tool_call_id": self.tool_call_id}
        found = {"role": "tool", "content": content}
        return found | {k: v for k, v in names.items() if v is not None}, media

    @classmethod
    def of(cls, value: Any) -> Self:
        """Return a response given as one, as text, as a mapping or as a like-shaped object."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(text=value)
        return cls.model_validate(plain(value))


def plain(value: Any) -> Any:
    """Return a mapping of a message or tool, models turned into dicts.

    Raises:
        TypeError: It is neither a mapping nor a model.
    """
    if isinstance(value, Mapping):
        return {key: plain(item) if _is_model(item) else item for key, item in value.items()}
    if _is_model(value):
        return value.model_dump(exclude_none=True)
    raise TypeError(f"a message is a mapping or a model, not {type(value).__name__!r}")


def _is_model(value: Any) -> bool:
    return isinstance(value, BaseModel)


def taken(value: Any) -> tuple[Message, Media]:
    """Return a message as a plain dict, and the media that stood in its content.

    Media become placeholders (`{"type": "image"}`); a placeholder that is one already stays.

    Raises:
        ValueError: No role.
        TypeError: No message at all.
    """
    message = dict(plain(value))
    if not isinstance(message.get("role"), str):
        raise ValueError(f"message without a role: {sorted(message)}")
    message.setdefault("content", "")
    media: Media = {key: [] for key in MEDIA_KEYS}
    if isinstance(message["content"], Sequence) and not isinstance(message["content"], str):
        message["content"] = [_item(plain(item), media) for item in message["content"]]
    if message.get("tool_calls"):
        message["tool_calls"] = [tool_call(call) for call in message["tool_calls"]]
    return message, media


def _item(item: Message, media: Media) -> Message:
    kind = item.get("type")
    key = _KINDS.get(kind) if isinstance(kind, str) else None
    if key is None or kind is None:
        return item
    payload = item.get(kind, item.get(key))
    if payload is None:
        return item
    media[key].append(payload)
    return {"type": key}


def tool_call(call: Any) -> Message:
    """Return a call in OpenAI's form with its arguments parsed, as templates print them."""
    found = dict(plain(call))
    function = dict(plain(found["function"])) if "function" in found else None
    if function is None:
        return found
    if isinstance(function.get("arguments"), str):
        # If the model wrote no JSON, the template prints what it wrote.
        with contextlib.suppress(json.JSONDecodeError):
            function["arguments"] = json.loads(function["arguments"])
    return {**found, "type": found.get("type", "function"), "function": function}
