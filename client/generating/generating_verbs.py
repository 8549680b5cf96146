"""The verbs that send prompts; `AsyncRolloutPool` inherits them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence, Sized
from typing import Any, Literal, Unpack, cast

from rollout_client.errors import ManyFailed, RequestRefused, RolloutError
from rollout_client.hooks import guard_progress
from rollout_client.option_names import check_option_names
from rollout_client.results import GenerateResult, ScoreResult
from rollout_common.wire import GenerateRequest, LogprobsOf, SamplingParams, WeightsId

from .attempt_verdicts import RequestPolicy
from .attempts import PoolContext
from .generate_call import GenerateCall, GenerationStream
from .generate_options import GenerateOptions, Prompt, ScoreOptions, make_request
from .sent_pictures import split_pictures
from .settings import DEFAULT_DEADLINE_SECONDS

DEFAULT_CONCURRENCY = 512
"""Requests of one `generate_many` in flight by default."""

Progress = Callable[[int, int], None]


class GeneratingVerbs:
    """Sends prompts, and makes attempts until each output has ended. `PoolOptions` has the options."""

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
        raise NotImplementedError

    def _lowest_weights(self) -> WeightsId | None:
        """Return the oldest weights for requests without bounds of their own."""
        raise NotImplementedError

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerateResult:
        """Sample from one prompt until every output has ended, whatever happens to replicas.

        Args:
            prompt: token_ids: [P] (a list, an array, a tensor), or a whole `GenerateRequest`.
            **options: See `GenerateOptions`: `sampling`, `session_id`, `deadline_seconds`, …

        Raises:
            RequestError: An output did not end; `kept` is what was received.
            ValueError: The prompt or an option can't be sent; says which, and why.
            TypeError: The prompt is of another kind, or an option does not exist.
        """
        return await self._make_call(prompt, options).run_call()

    async def score(
        self,
        token_ids: Prompt,
        *,
        start: int = 0,
        end: int | None = None,
        top_logprobs: int = 0,
        logprobs: LogprobsOf = "raw",
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult:
        """Return the logprobs of given tokens, each after those before it; nothing is sampled.

        Args:
            token_ids: [P], a list, an array or a tensor: a prompt, or prompt and output.
            start: The first position to score.
            end: The position after the last one; default: P.
            top_logprobs: How many of the most likely tokens to return at each position, at most 256.
            logprobs: `raw`: of the model's own distribution.
            **options: See `ScoreOptions`: `exact_version`, `deadline_seconds`, …

        Raises:
            RequestError: No replica scored it; says why.
            ValueError: An argument can't be sent; says which, and why.
        """
        check_option_names("score", options, ScoreOptions.__annotations__)
        given = make_request(token_ids, {})
        asked: dict[str, Any] = {
            **options,
            "sampling": SamplingParams(max_tokens=0),
            "prompt_logprobs": (start, len(given.token_ids) if end is None else end),
            "top_logprobs": top_logprobs,
            "logprobs": logprobs,
        }
        prompt = GenerateRequest(token_ids=given.token_ids, multimodal=given.multimodal)
        result = await self._make_call(prompt, cast(GenerateOptions, asked)).run_call()
        scores = result.prompt_logprobs
        assert scores is not None, "a call does not end without them"
        return ScoreResult(
            **dict(scores),
            token_ids=given.token_ids[scores.start : scores.start + len(scores.logprobs)],
            logprobs_of=result.logprobs_of or logprobs,
            usage=result.usage,
            attempts=result.attempts,
        )

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Return a stream of deltas, joined over all attempts; arguments as of `generate`.

        `async with pool.stream(…) as stream: async for delta in stream: …`, then `stream.result`.
        Tokens that might still be sampled again are held back: the last few with `stop` strings, all
        of them with `on_version_change="restart"` or with presence or frequency penalties.
        """
        return GenerationStream(self._make_call(prompt, options))

    async def as_completed(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[tuple[int, GenerateResult | RolloutError]]:
        """Yield (index, result or error) as requests end; at most `concurrency` run at once.

        The next prompt is taken from the iterable only when its request can start. Leaving the loop
        early ends the requests that are still running.
        """
        if concurrency < 1:
            raise ValueError("concurrency must be 1 or more")
        tried = {**options}
        if not isinstance(tried.get("prompt_logprobs"), bool | None):
            tried["prompt_logprobs"] = True  # a range is within some prompts, and beyond others
        make_request(
            (0,), cast(GenerateOptions, tried)
        )  # what is wrong for all prompts raises here
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
        """Generate; a prompt that can't be sent fails as if a worker had refused it."""
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
            TypeError: The prompts are an iterator: their number is not known.
        """
        if not isinstance(prompts, Sized):
            raise TypeError(
                f"generate_many needs to know how many prompts there are, not a "
                f"{type(prompts).__name__}: pass list(prompts), or use as_completed"
            )
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be raise or return, not {on_error!r}")
        results: list[Any] = [None] * len(prompts)
        ended, report = 0, guard_progress(progress or (lambda ended, total: None))
        async for index, result in self.as_completed(prompts, concurrency=concurrency, **options):
            results[index] = result
            ended += 1
            report(ended, len(prompts))
        if on_error == "raise" and any(isinstance(each, RolloutError) for each in results):
            raise ManyFailed(results)
        return results

    def _make_call(self, prompt: Prompt, options: GenerateOptions) -> GenerateCall:
        self._start_discovery()
        asked, pictures = split_pictures(make_request(prompt, options, self._deadline_seconds))
        request = self._with_pool_bounds(asked)
        request_id = request.request_id or uuid.uuid4().hex
        key = options.get("group_id") or request.session_id
        policy = RequestPolicy(
            key=request_id if key is None and self._deterministic else key,
            session_id=request.session_id or request_id,
            until=time.monotonic() + request.deadline_seconds,
            on_version_change=options.get("on_version_change", "continue"),
            max_failures=self._max_failures,
        )
        return GenerateCall(self._shared, request, request_id, policy, pictures)

    def _with_pool_bounds(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the pool's bounds, unless it has bounds of its own."""
        lowest = self._lowest_weights()
        own = (request.epoch, request.min_version, request.exact_version)
        if lowest is None or own != (None, None, None):
            return request
        changes = {"epoch": lowest.epoch, "min_version": lowest.version}
        return request.model_copy(update=changes)
