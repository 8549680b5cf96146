"""Wire model of structured output: what the text of an output must match."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from .wire_base import Body, _is_absent

__all__ = ["MAX_GRAMMAR_LENGTH", "StructuredOutput"]

MAX_GRAMMAR_LENGTH = 2**17
"""Most characters of a schema (as compact JSON), an expression or a grammar, or of all choices together."""
MAX_CHOICES = 1000
"""Grammars with a few thousand alternatives at one place are refused by the library that compiles them."""

Given = Mapping[str, Any] | tuple[str, ...] | str | None
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]


class StructuredOutput(Body):
    """What an output's text must match, from its first character to its end; exactly one field is set.

    Tokens that can't lead to such a text are masked before the temperature and the truncation, so `sampling` logprobs
    are those of the masked distribution. An output that reaches `max_tokens` first is a beginning of such a text.
    """

    json_schema: Mapping[str, Any] | None = Field(
        default=None, exclude_if=_is_absent, description="JSON that meets this JSON Schema."
    )
    regex: GrammarText | None = Field(
        default=None, exclude_if=_is_absent, description="A regular expression, in Rust's syntax."
    )
    grammar: GrammarText | None = Field(
        default=None, exclude_if=_is_absent, description="A context-free grammar: Lark or GBNF."
    )
    choice: tuple[GrammarText, ...] | None = Field(
        default=None,
        exclude_if=_is_absent,
        min_length=1,
        max_length=MAX_CHOICES,
        fail_fast=True,
        description="One of these texts.",
    )

    @field_validator("json_schema", "regex", "grammar", "choice")
    @classmethod
    def _bound_text(cls, value: Given) -> Given:
        if isinstance(value, Mapping):
            # Strict JSON: half of a surrogate pair or NaN would break the library's parser, or a frame to an engine.
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            _check_text(text)
        elif value is not None:
            _check_text("".join(value))
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            found = "none" if not given else " and ".join(given)
            raise ValueError(
                f"must have exactly one of json_schema, regex, grammar and choice, not {found}"
            )
        return self


def _check_text(text: str) -> None:
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise ValueError(
            f"has {len(text)} characters, and {MAX_GRAMMAR_LENGTH} are the most: make it smaller"
        )
    if "\0" in text or "\\u0000" in text:
        raise ValueError("must not contain the character NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be Unicode text: it has half of a surrogate pair") from None
