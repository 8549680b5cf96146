"""What a trainer needs to know about every token, in append-only columns.

For each token of a conversation: its id, whether it is trained on (`loss`), whether the policy
sampled it (`sampled`), its rollout logprob (0.0 where not sampled), its position, and the weights
that sampled it. Positions of plain text are counted, not stored; only multimodal rope stores three
axes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import GetCoreSchemaHandler, SerializationInfo
from pydantic_core import core_schema

from rollout_worker.schemas import WeightsSpan

from .buffers import FLOAT32, INT8, INT32, Column, View

Rope = tuple["array[int]", "array[int]", "array[int]"]


class Streams:
    """Columns of one conversation, all of the same length.

    Attributes:
        prompt: Number of prompt tokens; the rest is the response.
        weights: Spans of sampled tokens; `start` and `end` count from the conversation's start.
    """

    def __init__(self) -> None:
        self.prompt = 0
        self.ids: Column[int] = Column(INT32)
        self.loss: Column[int] = Column(INT8)
        self.sampled: Column[int] = Column(INT8)
        self.logprobs: Column[float] = Column(FLOAT32)
        self.weights: list[WeightsSpan] = []
        self.rope: tuple[Column[int], ...] = ()
        self.next_position = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Streams) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def append(
        self,
        ids: Sequence[int],
        *,
        loss: bool = False,
        logprobs: Iterable[float] | None = None,
        sampled: bool = False,
        weights: Iterable[WeightsSpan] = (),
        rope: Rope | None = None,
    ) -> None:
        """Append tokens; spans count from the first of them, `rope` from position 0."""
        start, count = len(self.ids), len(ids)
        self.ids.extend(ids)
        self.loss.fill(int(loss), count)
        self.sampled.fill(int(sampled), count)
        if logprobs is None:
            self.logprobs.fill(0.0, count)
        else:
            self.logprobs.extend(logprobs)
        for span in weights:
            self._join(
                span.model_copy(update={"start": span.start + start, "end": span.end + start})
            )
        self._place(count, rope)

    def _columns(self) -> tuple[Column[Any], ...]:
        return (self.ids, self.loss, self.sampled, self.logprobs, *self.rope)

    def _join(self, span: WeightsSpan) -> None:
        if self.weights:
            last = self.weights[-1]
            if last.model_copy(update={"start": span.start, "end": span.end}) == span and (
                last.end == span.start
            ):
                self.weights[-1] = last.model_copy(update={"end": span.end})
                return
        if span.end > span.start:
            self.weights.append(span)

    def _place(self, count: int, rope: Rope | None) -> None:
        if not count:
            return
        if rope is not None and not self.rope:
            before = range(len(self) - count)
            self.rope = tuple(Column(INT32, before) for _ in range(3))
        begin = self.next_position
        if rope is None:
            for axis in self.rope:
                axis.extend(range(begin, begin + count))
            self.next_position += count
            return
        for axis, delta in zip(self.rope, rope, strict=True):
            axis.extend([begin + position for position in delta])
        self.next_position += max(map(max, rope)) + 1

    def cut(self, length: int) -> None:
        """Drop every token from `length` on, with all that belongs to it."""
        if length >= len(self):
            return
        for column in self._columns():
            column.cut(length)
        while self.weights and self.weights[-1].start >= length:
            self.weights.pop()
        if self.weights and self.weights[-1].end > length:
            self.weights[-1] = self.weights[-1].model_copy(update={"end": length})
        self.prompt = min(self.prompt, length)
        # The largest position of a vision block need not be its last one, so check them all.
        self.next_position = (
            1 + max(max(axis.data) for axis in self.rope) if self.rope and length else length
        )

    def positions(self, start: int = 0, stop: int | None = None) -> tuple[Sequence[int], ...]:
        """Return the positions of `[start, stop)`: one row, or the three axes t, h, w."""
        if self.rope:
            return tuple(axis.view(start, stop) for axis in self.rope)
        return (range(len(self))[start:stop],)

    def view(self, name: str, start: int = 0, stop: int | None = None) -> View[Any]:
        """Return a slice of a column."""
        column: Column[Any] = getattr(self, name)
        return column.view(start, stop)

    _COLUMNS = (
        ("input_ids", "ids", INT32),
        ("loss_mask", "loss", INT8),
        ("response_mask", "sampled", INT8),
        ("rollout_log_probs", "logprobs", FLOAT32),
    )

    def document(self, binary: bool) -> dict[str, Any]:
        """Return JSON-like data; columns become lists, or little-endian bytes if `binary`."""

        def column(data: Column[Any]) -> bytes | list[Any]:
            return data.tobytes() if binary else data.data.tolist()

        found: dict[str, Any] = {"prompt_length": self.prompt}
        found |= {name: column(getattr(self, attribute)) for name, attribute, _ in self._COLUMNS}
        found["weights"] = [span.model_dump() for span in self.weights]
        found["rope_position_ids"] = [column(axis) for axis in self.rope]
        return found

    @classmethod
    def parse(cls, found: Any) -> Streams:
        """Restore what `document` returned.

        Raises:
            ValueError: Columns have different lengths, or the prompt is longer than they are.
        """
        if isinstance(found, Streams):
            return found
        streams = cls()
        for name, attribute, typecode in cls._COLUMNS:
            setattr(streams, attribute, Column(typecode, found[name]))
        streams.weights = [WeightsSpan.model_validate(span) for span in found["weights"]]
        streams.rope = tuple(Column(INT32, axis) for axis in found["rope_position_ids"])
        streams.prompt, length = int(found["prompt_length"]), len(streams)
        if (
            any(len(column) != length for column in streams._columns())
            or not 0 <= streams.prompt <= length
        ):
            raise ValueError("streams: column lengths differ, or the prompt is longer than them")
        streams.next_position = (
            1 + max(max(axis.data) for axis in streams.rope) if streams.rope and length else length
        )
        return streams

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        def dump(streams: Streams, info: SerializationInfo) -> Any:
            if info.mode_is_json():
                return streams.document(binary=False)
            return streams.document(binary=True) if info.context else streams

        return core_schema.no_info_plain_validator_function(
            cls.parse,
            serialization=core_schema.plain_serializer_function_ser_schema(dump, info_arg=True),
        )
