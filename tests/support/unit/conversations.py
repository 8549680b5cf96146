"""Conversations for tests: policies that say what they are told, in the ids of a real tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

from rollout_client.conversation.codec import Codec
from rollout_worker.schemas import RolloutRequest, WeightsSpan
from tests.support.unit.chatstyles import STYLES, tokenizer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
QUESTION = {"role": "user", "content": "what is the sum of seven and twelve?"}


@cache
def codec(style: str) -> Codec:
    """Return what reads and writes a style's ids."""
    return Codec(tokenizer(style))


@cache
def opened(style: str) -> str:
    """Return the text behind which a policy answers."""
    return codec(style).render([QUESTION], None, {}, generation_prompt=True)[-24:]


def begun(style: str, messages: list[Any] | None = None, **fields: Any) -> RolloutRequest:
    whole = {"max_prompt_len": 512, "request_id": "r", **fields}
    return RolloutRequest.from_messages(messages or [QUESTION], tokenizer(style), **whole)


def sampled(style: str, text: str, end: str | None = None) -> list[int]:
    """Return what a policy samples that says this: with the end that its family learnt."""
    said = text + (STYLES[style].end if end is None else end)
    if style == "mistral":
        said = " " + said  # its template prints a space before an answer
    ids, clean = codec(style).encode_after(opened(style), said)
    assert clean
    return ids


def answer(request: RolloutRequest, style: str, text: str, **more: Any) -> list[int]:
    tok = tokenizer(style)
    request.get_generation_prompt_ids(tok)
    ids = sampled(style, text, more.pop("end", None))
    request.add_assistant_message(tok, text, ids, **more)
    return ids


def spans(*versions: tuple[int, int]) -> list[WeightsSpan]:
    """Return spans of `(version, count)`, one after another."""
    found, at = [], 0
    for version, count in versions:
        found.append(WeightsSpan(epoch=1, version=version, start=at, end=at + count))
        at += count
    return found


def text_of(request: RolloutRequest, style: str) -> str:
    return codec(style).decode(request.input_ids.tolist())


class Counting:
    """A tokenizer that counts the characters that it renders and tokenizes, and keeps what it rendered last."""

    backend_tokenizer = None

    def __init__(self, inner: Any) -> None:
        self.inner, self.characters = inner, 0
        self.rendered: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        self.rendered = [*messages, *(options["tools"] or [])]
        text = self.inner.apply_chat_template(messages, **options)
        self.characters += len(text)
        return text

    def encode(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self.inner.encode(text, **options)
