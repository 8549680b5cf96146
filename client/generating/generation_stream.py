"""A generation as a stream of deltas; no token that was yielded is ever taken back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Self

from rollout_client.results import GenerateResult
from rollout_common.wire import StreamDelta

from .generate_call import GenerateCall


class GenerationStream:
    """Iterate over it once, inside `async with`; afterwards `result` has everything.

    Args:
        make: Makes the call, given the function to call when an output has new tokens.
    """

    def __init__(self, make: Callable[[Callable[[int], None]], GenerateCall]) -> None:
        self._fresh = asyncio.Event()
        self._call = make(lambda _: self._fresh.set())
        self._given = [0] * len(self._call.outputs)
        self._task: asyncio.Task[GenerateResult] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the generation if it is still running."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.exception()  # marks it as retrieved: the caller left early

    @property
    def result(self) -> GenerateResult:
        """The result: final once the iteration has ended, until then what there is so far."""
        task = self._task
        if task is not None and task.done() and not task.cancelled() and not task.exception():
            return task.result()
        return self._call.to_result()

    async def __aiter__(self) -> AsyncGenerator[StreamDelta]:
        """Yield deltas; their spans count from the output's first token.

        Raises:
            RequestError: After the last delta, if the generation failed.
        """
        if self._task is not None:
            raise RuntimeError("a stream can be iterated only once")
        self._task = asyncio.create_task(self._call.run_call())
        self._task.add_done_callback(lambda _: self._fresh.set())
        while True:
            self._fresh.clear()
            ended = self._task.done()
            for delta in self._new_deltas(whole=ended):
                yield delta
            if ended:
                self._task.result()
                return
            await self._fresh.wait()

    def _new_deltas(self, *, whole: bool) -> list[StreamDelta]:
        deltas = []
        for index, output in enumerate(self._call.outputs):
            draft, start = output.draft, self._given[index]
            end = len(draft) - (0 if whole else output.retractable)
            if end > start:
                deltas.append(draft.delta_between(start, end))
                self._given[index] = end
        return deltas
