"""Deltas of a generation, for programs without an event loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from rollout_client.generating.streams import GenerationStream
from rollout_client.results import GenerateResult
from rollout_worker.schemas import StreamDelta

from .loop_thread import LoopThread


class SyncStream:
    """A `GenerationStream` for programs without an event loop."""

    def __init__(self, thread: LoopThread, stream: GenerationStream) -> None:
        self._thread = thread
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.call(self._stream.close())

    def __iter__(self) -> Iterator[StreamDelta]:
        """Yield deltas; their spans count from the output's first token."""
        deltas = self._stream.__aiter__()
        try:
            while (delta := self._thread.call(following(deltas))) is not None:
                yield delta
        finally:
            self._thread.call(deltas.aclose())

    @property
    def result(self) -> GenerateResult:
        """The result: final once the iteration has ended, until then what there is so far."""
        return self._thread.read(lambda: self._stream.result)


async def following(iterator: Any) -> Any:
    """Return the next item of an asynchronous iterator; None: there is none."""
    return await anext(iterator, None)
