"""Wire models of what a request and its answer may have beyond tokens: pictures, structured output, scores, replay records.

A trainer that routes as the sampler did, and renormalises over the same tokens, computes the logprobs that the sampler had:
replay records say which experts each token went to, and which tokens could be sampled. Their arrays are base64 of
little-endian numbers in JSON.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from .wire_base import Body, Float, Int, TokenId, WeightsId, Wire, bounded_length, omittable_field

if TYPE_CHECKING:
    import numpy

__all__ = [
    "MAX_GRAMMAR_LENGTH",
    "MAX_IMAGES",
    "MAX_IMAGE_BYTES",
    "MAX_IMAGE_REQUEST_BYTES",
    "MAX_RECORD_BYTES",
    "MAX_SCORED_VALUES",
    "MAX_TOP_LOGPROBS",
    "ImageInput",
    "Multimodal",
    "PromptLogprobs",
    "PromptRange",
    "RoutedExperts",
    "SamplingMask",
    "StructuredOutput",
    "TopLogprobs",
    "encode_schema",
]

MAX_IMAGES = 64
"""Most pictures of one request."""
MAX_IMAGE_BYTES = 16 * 2**20
"""Most bytes of one encoded picture: a photograph of 33 million pixels."""
MAX_IMAGE_REQUEST_BYTES = 48 * 2**20
"""Most bytes of all encoded pictures that one request carries; those by `ref` carry none."""
MAX_IMAGE_TEXT = -(-MAX_IMAGE_BYTES // 3) * 4
"""The same for one picture in base64."""

ImageData = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_IMAGE_TEXT)]
ImageRef = Annotated[str, Field(strict=True, pattern=r"^sha256:[0-9a-f]{64}$")]


class ImageInput(Body):
    """One picture: either its encoded bytes, or the hash of bytes that this worker has been sent before."""

    data: ImageData | None = Field(
        default=None, description="An encoded picture (PNG or JPEG) in base64."
    )
    ref: ImageRef | None = Field(
        default=None, description="`sha256:` and the hash of the encoded bytes, in hexadecimal."
    )

    @model_validator(mode="after")
    def _name_one(self) -> Self:
        if (self.data is None) == (self.ref is None):
            raise ValueError("must have either data or ref: the bytes, or the hash of known ones")
        return self


class Multimodal(Body):
    """What a prompt has besides text: the pictures of its placeholders, in the order of these."""

    images: Annotated[
        tuple[ImageInput, ...],
        Field(min_length=1, max_length=MAX_IMAGES, fail_fast=True),
        bounded_length(MAX_IMAGES),
    ]


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

    json_schema: Mapping[str, Any] | None = omittable_field("JSON that meets this JSON Schema.")
    regex: GrammarText | None = omittable_field("A regular expression, in Rust's syntax.")
    grammar: GrammarText | None = omittable_field("A context-free grammar: Lark or GBNF.")
    choice: tuple[GrammarText, ...] | None = omittable_field(
        "One of these texts.", min_length=1, max_length=MAX_CHOICES, fail_fast=True
    )

    @field_validator("json_schema", "regex", "grammar", "choice")
    @classmethod
    def _bound_text(cls, value: Given) -> Given:
        if isinstance(value, Mapping):
            _check_text(encode_schema(value))
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


def encode_schema(schema: Mapping[str, Any]) -> str:
    """Return a JSON Schema as compact JSON.

    Raises:
        ValueError: It has more than `MAX_GRAMMAR_LENGTH` characters, or NaN or infinity, which no JSON has.
    """
    writer = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    pieces, length = [], 0
    # Piece by piece: written at once, 16 MiB would hold the loop for tenths of a second.
    for piece in writer.iterencode(schema):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_GRAMMAR_LENGTH:
            raise ValueError(
                f"has more than {MAX_GRAMMAR_LENGTH} characters, which are the most: make it smaller"
            )
    return "".join(pieces)


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


MAX_TOP_LOGPROBS = 256
"""Largest `top_logprobs`."""
MAX_SCORED_VALUES = 2**21
"""Most logprobs of a prompt in one response, some 60 MB of JSON: 32,768 positions with 63 tokens each, or 8,160 with 256."""


def _check_range(value: Any) -> Any:
    """Accept a boolean, or two positions of which the first is less: one message for everything else."""
    if value is None or isinstance(value, bool):
        return value
    numbers = isinstance(value, list | tuple) and [type(each) for each in value] == [int, int]
    if not (numbers and 0 <= value[0] < value[1]):
        raise ValueError("must be true, or [from, to] with 0 <= from < to: positions of the prompt")
    return value


PromptRange = Annotated[bool | tuple[Int, Int], BeforeValidator(_check_range)]
"""Which positions of a prompt to score: all of them, or those from the first number up to the second."""


class TopLogprobs(Wire):
    """The most likely tokens at each of T positions, likeliest first: token_ids [T][k], logprobs [T][k].

    A row is shorter than k where fewer tokens can be drawn. The chosen token is in it only if it is among the k.
    """

    token_ids: tuple[tuple[TokenId, ...], ...]
    logprobs: tuple[tuple[Float, ...], ...]


class PromptLogprobs(Wire):
    """Logprobs of the prompt's tokens at positions `[start, start + T)`: logprobs [T], top_logprobs [T][k].

    The token at position 0 follows nothing, so its logprob is null and its row empty; placeholders of pictures, which no
    model draws, have null, too. One version of the weights
    computed all of them.
    """

    start: int = Field(ge=0)
    logprobs: tuple[Float | None, ...]
    top_logprobs: TopLogprobs | None = omittable_field()
    weights: WeightsId


MAX_RECORD_BYTES = 2**27
"""Most bytes of routes in one response: 128 MB, some 340,000 tokens of 48 layers with 8 experts each."""


class RoutedExperts(Wire):
    """The experts of tokens of prompt and output, in order, from position `start` on: [rows, layers, top_k].

    Row r belongs to the token at position `start` + r, where the prompt's first token has position 0; the model chose
    these experts when it read that token. The last token of an output was not read, so a whole record has one row less than
    prompt and output have tokens. Layers are those that route, in their order.
    """

    start: int = Field(ge=0)
    rows: int = Field(ge=0)
    layers: int = Field(ge=1)
    top_k: int = Field(ge=1)
    dtype: Literal["uint8", "uint16"]
    data: str = Field(description="Base64 of [rows, layers, top_k], little-endian.")

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return self.layers * self.top_k * (1 if self.dtype == "uint8" else 2)

    def to_bytes(self) -> bytes:
        """Return the numbers; raises `ValueError` if there are not as many as the shape says."""
        data = base64.b64decode(self.data, validate=True)
        if len(data) != self.rows * self.row_bytes:
            raise ValueError(f"{len(data)} bytes of routes, expected {self.rows * self.row_bytes}")
        return data

    def to_array(self) -> numpy.ndarray[Any, Any]:
        """Return the experts as an array [rows, layers, top_k]; needs numpy."""
        import numpy

        kind = numpy.dtype(self.dtype).newbyteorder("<")
        numbers = numpy.frombuffer(self.to_bytes(), dtype=kind)
        return numbers.reshape(self.rows, self.layers, self.top_k)


class SamplingMask(Wire):
    """Which tokens could have been drawn instead of each token of an output, after every parameter of `sampling`: T rows.

    `counts` [T]: how many of the `vocab_size` ids. `data`: the rows, one after the other. Of a row with all ids there is
    nothing; else it is the ids in ascending order, 4 bytes each, or, where that is shorter, a bit for each id of the
    vocabulary, the lowest bit of each byte first, filled up to whole bytes.
    """

    vocab_size: int = Field(ge=1)
    counts: tuple[int, ...]
    data: str = Field(description="Base64 of the rows.")

    def to_rows(self) -> list[bytes]:
        """Return the rows; raises `ValueError` if `data` has another length than `counts` says."""
        data, at, rows = base64.b64decode(self.data, validate=True), 0, []
        for count in self.counts:
            size = mask_row_bytes(count, self.vocab_size)
            rows.append(data[at : at + size])
            at += size
        if at != len(data):
            raise ValueError(f"{len(data)} bytes of masks, expected {at}")
        return rows

    def allowed_ids(self) -> list[numpy.ndarray[Any, Any]]:
        """Return the ids that could be drawn for each token, ascending, as arrays; needs numpy."""
        return [
            unpack_mask_row(row, count, self.vocab_size)
            for row, count in zip(self.to_rows(), self.counts, strict=True)
        ]


def mask_row_bytes(count: int, vocab_size: int) -> int:
    """Return how many bytes the row of a `SamplingMask` with `count` ids has."""
    return 0 if count == vocab_size else min(4 * count, -(-vocab_size // 8))


def unpack_mask_row(row: bytes, count: int, vocab_size: int) -> numpy.ndarray[Any, Any]:
    """Return the ids of a row of a `SamplingMask`, ascending; needs numpy."""
    import numpy

    if count == vocab_size:
        return numpy.arange(vocab_size, dtype=numpy.uint32)
    if 4 * count <= -(-vocab_size // 8):
        return numpy.frombuffer(row, dtype=numpy.dtype("<u4"))
    bits = numpy.unpackbits(numpy.frombuffer(row, dtype=numpy.uint8), bitorder="little")
    return bits[:vocab_size].nonzero()[0].astype(numpy.uint32)
