"""The client over several real workers: continuation, versions, deaths, members that come and go."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from rollout_client import (
    AsyncRolloutPool,
    GenerateResult,
    PoolClosed,
    RolloutPool,
)
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, InProcess, several_in_process
from tests.support.waiting import until

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def workers(tiny_models: TinyModels) -> Iterator[list[InProcess]]:
    """Two workers for all tests; their weights only rise."""
    with several_in_process(tiny_models.model(1)) as workers:
        yield workers


@pytest.fixture
async def pool(workers: list[InProcess]) -> AsyncIterator[AsyncRolloutPool]:
    async with AsyncRolloutPool.from_urls([w.url for w in workers]) as pool:
        await pool.wait_serving(len(workers))
        yield pool


def whole(result: GenerateResult, tokens: int, prompt: int = len(PROMPT)) -> None:
    """Tokens, logprobs and spans of an output cover each other."""
    output = result.output
    assert len(output.token_ids) == tokens
    assert output.logprobs is not None
    assert len(output.logprobs) == tokens
    spans = [(0, 0), *((s.start, s.end) for s in output.weights)]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] == tokens
    assert result.usage.prompt_tokens == prompt
    assert result.usage.completion_tokens == tokens


async def test_the_answer_is_the_workers(pool: AsyncRolloutPool, workers: list[InProcess]) -> None:
    direct = workers[0].sample(max_tokens=12)
    result = await pool.generate(PROMPT, sampling={**GREEDY, "max_tokens": 12})
    whole(result, 12)
    assert list(result.token_ids) == direct["token_ids"]
    assert result.logprobs == pytest.approx(direct["logprobs"], abs=1e-5)
    assert result.output.stop_reason == "length"
    assert result.logprobs_of == "sampling"
    assert [a.outcome for a in result.attempts] == ["finished"]
    assert result.timing.first_token_seconds is not None


async def test_n_spreads_and_keeps_the_seeds_of_one_worker(
    pool: AsyncRolloutPool, workers: list[InProcess]
) -> None:
    sampling = {"max_tokens": 6, "seed": 11, "n": 4, "ignore_eos": True}
    direct = workers[0].generate(sampling=sampling).json()["outputs"]
    result = await pool.generate(PROMPT, sampling=sampling)
    assert [list(o.token_ids) for o in result.outputs] == [o["token_ids"] for o in direct]
    assert [o.index for o in result.outputs] == [0, 1, 2, 3]
    assert len({a.replica for a in result.attempts}) == 2
    assert result.usage.prompt_tokens == len(PROMPT)
    assert result.usage.completion_tokens == 24


async def test_leaving_a_stream_ends_it_on_the_worker(
    pool: AsyncRolloutPool, workers: list[InProcess]
) -> None:
    async with pool.stream(PROMPT, sampling={**GREEDY, "max_tokens": 1800}) as stream:
        async for _ in stream:
            break
    await until(lambda: sum(w.state()["in_flight"] for w in workers) == 0, what="the abort")
    assert 0 < len(stream.result.token_ids) < 1800
    assert stream.result.output.stop_reason == "aborted"


def test_the_synchronous_pool_does_the_same(workers: list[InProcess]) -> None:
    sampling = {**GREEDY, "max_tokens": 5}
    with RolloutPool.from_urls([w.url for w in workers]) as pool:
        assert len(pool.wait_serving(2, seconds=10)) == 2
        assert pool.info().engine == "hf"
        result = pool.generate(PROMPT, sampling=sampling)
        with pool.stream(PROMPT, sampling=sampling) as stream:
            streamed = [token for delta in stream for token in delta.token_ids]
        assert tuple(streamed) == result.token_ids == stream.result.token_ids
        assert len(pool.generate_many([PROMPT] * 3, sampling=sampling)) == 3
        ended = {index for index, _ in pool.as_completed([PROMPT] * 3, sampling=sampling)}
        assert ended == {0, 1, 2}


# Weights that change, sleep, death. Who runs last leaves both workers serving.

VERSIONS = itertools.count(1)


async def started(pool: AsyncRolloutPool, workers: list[InProcess]) -> None:
    await until(lambda: sum(w.state()["in_flight"] for w in workers) > 0, what="a request to run")
    await asyncio.sleep(0.1)


class Publisher:
    """Brings the next version to both workers as an operator would."""

    def __init__(self, workers: list[InProcess], models: TinyModels) -> None:
        self.workers = workers
        self.version = next(VERSIONS)
        self.path = models.weights(2 + self.version % 2)

    async def stage(self) -> None:
        for worker in self.workers:
            await asyncio.to_thread(worker.stage, 1, self.version, self.path)

    async def commit(self, *workers: InProcess) -> None:
        commits = [
            asyncio.to_thread(worker.commit, 1, self.version, in_flight="Abort")
            for worker in workers or self.workers
        ]
        await asyncio.gather(*commits)


@pytest.fixture
def publisher(workers: list[InProcess], tiny_models: TinyModels) -> Publisher:
    return Publisher(workers, tiny_models)


async def test_an_output_continues_under_new_weights_with_one_budget(
    pool: AsyncRolloutPool, workers: list[InProcess], publisher: Publisher
) -> None:
    await publisher.stage()
    sampling = {**GREEDY, "max_tokens": 500}
    running = asyncio.create_task(pool.generate(PROMPT, sampling=sampling))
    await started(pool, workers)
    await publisher.commit()
    result = await running
    whole(result, 500)
    assert len(result.output.weights) == 2
    assert result.output.weights[1].version == publisher.version
    *aborted, last = result.attempts
    assert {(a.outcome, a.cause) for a in aborted} == {("aborted", "weights")}
    assert last.outcome == "finished"
    assert sum(a.tokens for a in result.attempts) == 500
    # What follows the break is what the new weights say after all tokens before it.
    break_at = result.output.weights[0].end
    prompt = [*PROMPT, *result.token_ids[:break_at]]
    again = workers[0].generate(token_ids=prompt, sampling={**GREEDY, "max_tokens": 20})
    rest = list(result.token_ids[break_at : break_at + 20])
    assert again.json()["outputs"][0]["token_ids"] == rest


async def test_what_came_before_the_pool_was_closed_is_kept(workers: list[InProcess]) -> None:
    received: list[int] = []

    async def read(pool: AsyncRolloutPool) -> None:
        async with pool.stream(PROMPT, sampling={**GREEDY, "max_tokens": 1800}) as stream:
            async for delta in stream:
                received.extend(delta.token_ids)
                await pool.close()

    with pytest.raises(PoolClosed) as error:
        await read(AsyncRolloutPool.from_urls([w.url for w in workers]))
    assert error.value.kept is not None
    assert error.value.kept.token_ids[: len(received)] == tuple(received) != ()
