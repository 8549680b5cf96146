"""The verbs that prompts are sent with. `AsyncRolloutPool` has them all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence, Sized
from typing import Any, Literal, Unpack

from rollout_client.errors import ManyFailed, RequestRefused, RolloutError
from rollout_client.hooks import guard_progress
from rollout_client.results import GenerateResult
from rollout_common.wire import GenerateRequest, WeightsId

from .attempts import PoolContext
from .generate_call import CallOptions, GenerateCall
from .generate_options import GenerateOptions, Prompt, make_request
from .generation_stream import GenerationStream
from .settings import DEFAULT_DEADLINE_SECONDS

DEFAULT_CONCURRENCY = 512
"""Requests in flight of one `generate_many` unless said otherwise."""

Progress = Callable[[int, int], None]


class GeneratingVerbs:
    """Sends prompts and sees each through to its end.

    Args:
        shared: Router, connections and hook of the pool.
        max_failures: Broken attempts that one output survives.
        deterministic: Whether replicas are chosen by a stable hash.
        deadline_seconds: Of requests that name none.
    """

    def __init__(
        self,
        shared: PoolContext,
        *,
        max_failures: int,
        deterministic: bool,
        deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    ) -> None:
        self._shared = shared
        self._deadline_seconds = deadline_seconds
        self._max_failures = max_failures
        self._deterministic = deterministic

    def _start_discovery(self) -> None:
        """Begin to look for members; called with each prompt."""
        raise NotImplementedError

    def _lowest_weights(self) -> WeightsId | None:
        """Return what must at least serve requests without bounds of their own."""
        raise NotImplementedError

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """Sample from one prompt until every output has ended, whatever happens to replicas.

        Args:
            prompt: token_ids: [P] (a list, an array, a tensor), or a whole `GenerateRequest`.
            **options: See `GenerateOptions`: `sampling`, `session_id`, `deadline_seconds`, …

        Raises:
            RequestError: An output did not end; `kept` is what had been received.
            ValueError: The prompt or an option can't be sent; says which, and why.
            TypeError: The prompt is of no such kind, or there is no such option.
        """
        return await self._make_call(prompt, options).run_call()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Return a stream of deltas, joined over all attempts; arguments as of `generate`.

        `async with pool.stream(…) as stream: async for delta in stream: …`, then `stream.result`.
        Tokens that might still be sampled again are held back: the last few with `stop` strings, all
        of them with `on_version_change="restart"` or with presence or frequency penalties.
        """
        return GenerationStream(lambda on_tokens: self._make_call(prompt, options, on_tokens))

    async def as_completed(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[tuple[int, GenerateResult | RolloutError]]:
        """Yield (index, result or error) as requests end; at most `concurrency` run at once.

        A prompt is taken from the iterable only when there is room for it. Leaving the loop early
        ends the requests that are still running.
        """
        if concurrency < 1:
            raise ValueError("concurrency must be 1 or more")
        make_request((0,), options)  # what is wrong for all prompts is told before any is sent
        waiting = enumerate(prompts)
        running: dict[asyncio.Task[GenerateResult], int] = {}
        try:
            while True:
                while len(running) < concurrency and (following := next(waiting, None)):
                    index, prompt = following
                    running[asyncio.create_task(self._generate_one(prompt, options))] = index
                if not running:
                    return
                ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    index = running.pop(task)
                    error = task.exception()
                    if error is not None and not isinstance(error, RolloutError):
                        raise error
                    yield index, error if error is not None else task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _generate_one(self, prompt: Prompt, options: GenerateOptions) -> GenerateResult:
        """Generate; a prompt that can't be sent fails like one that a worker refused."""
        try:
            call = self._make_call(prompt, options)
        except (ValueError, TypeError) as error:
            raise RequestRefused(str(error), status=422, slug="invalid-request") from error
        return await call.run_call()

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: Progress | None = None,
        on_error: Literal["raise", "return"] = "raise",
        **options: Unpack[GenerateOptions],
    ) -> list[Any]:
        """Sample from many prompts; the results are in the order of the prompts.

        Args:
            prompts: As `generate` takes them.
            concurrency: How many requests run at once.
            progress: Called with (ended, total) after each.
            on_error: A failed request never stops the others. Afterwards `raise` raises
                `ManyFailed` with all results; `return` returns the errors in their places.
            **options: Further arguments of `generate`, the same for all prompts.

        Raises:
            ManyFailed: See `on_error`.
            TypeError: The prompts are an iterator, whose results have no known number.
        """
        if not isinstance(prompts, Sized):
            raise TypeError(
                f"generate_many needs to know how many prompts there are, not a "
                f"{type(prompts).__name__}: pass list(prompts), or use as_completed"
            )
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be raise or return, not {on_error!r}")
        results: list[Any] = [None] * len(prompts)
        ended, tell = 0, None if progress is None else guard_progress(progress)
        async for index, result in self.as_completed(prompts, concurrency=concurrency, **options):
            results[index] = result
            ended += 1
            if tell is not None:
                tell(ended, len(prompts))
        if on_error == "raise" and any(isinstance(each, RolloutError) for each in results):
            raise ManyFailed(results)
        return results

    def _make_call(
        self,
        prompt: Prompt,
        options: GenerateOptions,
        on_tokens: Callable[[int], None] = lambda index: None,
    ) -> GenerateCall:
        self._start_discovery()
        request = make_request(prompt, options, self._deadline_seconds)
        how = CallOptions(
            options.get("on_version_change", "continue"),
            self._max_failures,
            options.get("group_id"),
            self._deterministic,
        )
        return GenerateCall(self._shared, self._with_pool_bounds(request), how, on_tokens)

    def _with_pool_bounds(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the pool's bounds, unless it has bounds of its own."""
        lowest = self._lowest_weights()
        own = (request.epoch, request.min_version, request.exact_version)
        if lowest is None or own != (None, None, None):
            return request
        changes = {"epoch": lowest.epoch, "min_version": lowest.version}
        return request.model_copy(update=changes)
