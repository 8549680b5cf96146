"""Answers of one worker that is odd on purpose: what is tried again, what is not, what is kept."""

from __future__ import annotations

import asyncio
from array import array
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from aiohttp import web

from rollout_client import (
    AsyncRolloutPool,
    GenerateRequest,
    GenerateResult,
    ManyFailed,
    NoReplica,
    PrometheusHook,
    RequestRefused,
    WeightsId,
)
from rollout_client.generating.generate_options import Prompt
from rollout_client.http_clients import MemberClients, trusted_authorities
from rollout_common.wire.event_frames import STREAM_COMMENT
from tests.support.unit.scripted import (
    END,
    PROMPT,
    ScriptedWorker,
    Step,
    after,
    event,
    problem,
    tokens,
)  # fmt: skip
from tests.support.waiting import until


@pytest.mark.parametrize("dies", [True, False])
async def test_what_a_pool_serves_is_said_by_who_answers(
    workers: list[ScriptedWorker], *, dies: bool
) -> None:
    """A replica may die at any moment, this one included, or be too old to say what a client needs."""
    worker, other = workers

    async def answer(request: web.Request) -> web.StreamResponse:
        if dies and request.transport is not None:
            request.transport.abort()
        return web.json_response({"engine": "of another release"})

    worker.server.answers["GET", "/v1/info"] = answer
    other.says_ends(7)
    async with AsyncRolloutPool.from_urls([worker.url, other.url]) as pool:
        assert (await pool.info(seconds=30)).eos_token_ids == (7,)
    async with AsyncRolloutPool.from_urls([worker.url]) as pool:
        with pytest.raises(NoReplica, match="GET /v1/info"):
            await pool.info(seconds=0.1)


def told(pool: AsyncRolloutPool, worker: ScriptedWorker, step: Step) -> Step:
    """Do a step once the client knows which ids end outputs there."""
    records = pool._router.balancer.records

    known = partial(until, lambda: records[worker.url].info is not None, what="what it is")
    return after(known, step)


async def test_a_cut_stream_goes_on_where_it_stopped(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [tokens([5, 6], None), tokens([7], None, version=1)]
    worker.steps.append(tokens([8, 9, 10], version=1))
    sampling = {**END, "seed": 3, "min_tokens": 3}
    result = await pool.generate(PROMPT, sampling=sampling, session_id="s", request_id="r")
    assert result.token_ids == (5, 6, 7, 8, 9, 10)
    assert [(s.version, s.start, s.end) for s in result.output.weights] == [
        (0, 0, 2),
        (1, 2, 6),
    ]
    bounds = [(b.get("epoch"), b.get("min_version")) for b in worker.bodies]
    assert bounds == [(None, None), (0, 0), (0, 1)], "never on to older weights"
    first, second, third = worker.bodies
    assert second["token_ids"] == [*PROMPT, 5, 6]
    assert third["token_ids"] == [*PROMPT, 5, 6, 7]
    assert [b["sampling"]["max_tokens"] for b in worker.bodies] == [6, 4, 3]
    assert [b["sampling"].get("min_tokens", 0) for b in worker.bodies] == [3, 1, 0]
    assert [b["request_id"] for b in worker.bodies] == ["r.a0", "r.a1", "r.a2"]
    assert {b["session_id"] for b in worker.bodies} == {"s"}
    assert len({b["sampling"]["seed"] for b in worker.bodies}) == 3
    assert [a.outcome for a in result.attempts] == ["broken", "broken", "finished"]
    assert [a.request_id for a in result.attempts] == ["r.a0", "r.a1", "r.a2"]
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 6)
    assert result.timing.preemptions == 1
    assert first["deadline_seconds"] > third["deadline_seconds"] > 590


def scored(start: int, *logprobs: float | None, version: int = 0) -> bytes:
    """A part of a prompt's scores."""
    weights = {"epoch": 0, "version": version}
    return event("prompt_logprobs", {"start": start, "logprobs": logprobs, "weights": weights})


async def test_a_prompt_is_scored_by_one_attempt(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    """Whoever loses its worker in the middle scores the prompt again, and is not whole before."""
    worker.steps = [
        tokens([], None, tail=scored(0, None, -1.0)),
        tokens([], tail=scored(0, None, -1.0)),
        tokens([], tail=scored(0, None, -2.0, version=3) + scored(2, -3.0, version=3)),
    ]
    result = await pool.score(PROMPT)
    assert (result.logprobs, result.weights.version) == ((None, -2.0, -3.0), 3)
    assert (result.token_ids, result.logprobs_of) == (tuple(PROMPT), "sampling")
    assert [a.outcome for a in result.attempts] == ["broken", "broken", "finished"]
    assert [b["prompt_logprobs"] for b in worker.bodies] == [[0, 3]] * 3
    assert worker.bodies[0]["sampling"] == {"max_tokens": 0}
    assert worker.bodies[0]["logprobs"] == "raw"
    with pytest.raises(ValueError, match="prompt_logprobs: must end within the prompt"):
        await pool.score(PROMPT, end=4)
    with pytest.raises(TypeError, match="score has no argument 'sampling'"):
        await pool.score(PROMPT, sampling={})  # type: ignore[call-arg]


async def test_an_eos_before_the_cut_is_the_end(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    """The worker does not say which ids end outputs: the last token is sampled again. Then it does."""
    worker.steps = [tokens([5, 2], None), tokens([2], "stop", match=2)]
    result = await pool.generate(PROMPT, sampling={"max_tokens": 6})
    assert worker.bodies[1]["token_ids"] == [*PROMPT, 5]
    assert result.token_ids == (5, 2)
    worker.says_ends(2, 9)
    pool._router.balancer.records[worker.url].info_at = 0.0  # else it is asked again in 3 s
    worker.steps += [told(pool, worker, tokens([4, 2], None))]
    again = await pool.generate(PROMPT, sampling={"max_tokens": 6})
    assert again.token_ids == (4, 2)
    assert again.output.stop_reason == "stop"
    assert again.output.stop_match is not None
    assert again.output.stop_match.token_id == 2
    assert len(worker.bodies) == 3


@pytest.mark.parametrize(
    ("asked", "is_of"), [(None, "raw"), ("sampling", "sampling"), ("none", None)]
)
async def test_an_end_that_no_worker_told_keeps_the_kind_of_its_logprobs(
    pool: AsyncRolloutPool,
    worker: ScriptedWorker,
    asked: Literal["sampling", "none"] | None,
    is_of: str | None,
) -> None:
    """A worker that is killed right after the last token has not said what its logprobs are."""
    worker.says_ends(2, logprobs=("raw", "sampling"))
    worker.steps = [told(pool, worker, tokens([4, 2], None))]
    result = await pool.generate(PROMPT, sampling={"max_tokens": 6}, logprobs=asked)
    assert [each.outcome for each in result.attempts] == ["broken"]
    assert result.token_ids == (4, 2)
    assert result.logprobs_of == is_of


async def test_a_token_is_sampled_again_once(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    """Attempts that give nothing take no more back: a stream has given the tokens before it out."""
    worker.steps = [tokens([5, 6, 7], None), tokens([], None), tokens([8], "stop", match=8)]
    result = await pool.generate(PROMPT, sampling={"max_tokens": 6})
    assert worker.bodies[1]["token_ids"] == worker.bodies[2]["token_ids"] == [*PROMPT, 5, 6]
    assert result.token_ids == (5, 6, 8)


async def test_a_stop_string_across_the_cut_is_not_missed(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [tokens([1, 2, 3, 4], None), tokens([2, 3, 4, 5], "stop")]
    sampling = {**END, "stop": ["abc"]}
    seen: list[int] = []
    async with pool.stream(PROMPT, sampling=sampling) as stream:
        async for delta in stream:
            seen += delta.token_ids
    assert worker.bodies[1]["token_ids"] == [*PROMPT, 1]
    assert tuple(seen) == stream.result.token_ids == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    "bad",
    [
        tokens([1], tail=event("error", {"detail": "the stream broke"})),
        tokens([1], tail=b"event: delta\ndata: {nonsense\n\n"),
        tokens([1], tail=event("delta", {"index": 0, "token_ids": [1], "weights": []})),
        problem(502, ""),
    ],
    ids=["error event", "no JSON", "no span", "a gateway"],
)
async def test_what_breaks_is_tried_again(
    pool: AsyncRolloutPool, worker: ScriptedWorker, bad: Step
) -> None:
    worker.steps = [bad, tokens([1], "stop")]
    result = await pool.generate(PROMPT, sampling=END)
    assert len(result.attempts) == 2
    assert result.attempts[0].cause


async def test_who_sleeps_is_asked_only_whether_it_is_ready(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    await pool.wait_serving()
    worker.ready(503)
    worker.steps = [problem(503, "asleep", retry=5), tokens([1], "stop")]
    running = asyncio.create_task(pool.generate(PROMPT))
    probes = partial(worker.server.requests.count, ("GET", "/ready", ""))
    await until(lambda: probes() >= 3, what="probes")
    assert len(worker.bodies) == 1
    assert pool.serving() == []
    worker.ready()
    await asyncio.wait_for(running, 5)
    assert len(worker.bodies) == 2


async def comment_on(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Stream comments and nothing else, as a worker whose engine hangs."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    while True:
        await response.write(STREAM_COMMENT)
        await asyncio.sleep(0.03)


@pytest.mark.parametrize("silence", [after(partial(asyncio.sleep, 30), tokens([])), comment_on])
async def test_a_silent_worker_that_is_dead_is_left(worker: ScriptedWorker, silence: Step) -> None:
    worker.steps = [silence, tokens([1], "stop")]
    worker.server.answer("GET", "/health", {"status": "bad"}, 503)
    async with AsyncRolloutPool.from_urls([worker.url], silent_seconds=0.1) as pool:
        result = await asyncio.wait_for(pool.generate(PROMPT), 10)
    assert "silent" in result.attempts[0].cause


async def test_the_pools_floor_is_sent_unless_the_request_has_bounds(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [tokens([1], "stop", version=9)]
    pool.floor = WeightsId(epoch=0, version=4)
    await pool.generate(PROMPT)
    await pool.generate(PROMPT, min_version=2)
    sent = [(b.get("epoch"), b.get("min_version")) for b in worker.bodies]
    assert sent == [(0, 4), (None, 2)]


async def test_a_member_with_weights_below_the_floor_does_not_serve(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    """It is asked which weights it has only while somebody waits for it."""

    def active(version: int) -> dict[str, Any]:
        weights = {"epoch": 0, "version": version, "root_hash": "h"}
        return {"active": weights, "commit_seq": 1, "fence_epoch": 0}

    await pool.wait_serving()
    pool._note_weights(worker.url, WeightsId(epoch=0, version=3))
    pool.floor = WeightsId(epoch=0, version=4)
    assert pool.serving() == []
    worker.server.answer("GET", "/v1/weights", active(3))
    with pytest.raises(NoReplica, match=r"0 of 1 replicas serve \(.*has weights \(0, 3\)"):
        await pool.wait_serving(seconds=0.15)
    worker.server.answer("GET", "/v1/weights", active(4))
    assert len(await pool.wait_serving(seconds=10)) == 1
    assert len(pool.serving()) == 1


async def test_bad_arguments_never_leave(pool: AsyncRolloutPool, worker: ScriptedWorker) -> None:
    with pytest.raises(ValueError, match="top_p"):
        await pool.generate(PROMPT, sampling={"top_p": 2})
    with pytest.raises(ValueError, match="max_tokns does not exist: do you mean 'max_tokens'"):
        await pool.generate(PROMPT, sampling={"max_tokns": 2})
    with pytest.raises(ValueError, match="request_id"):
        await pool.generate(PROMPT, request_id="x" * 201)
    with pytest.raises(ValueError, match="continue, restart, fail"):
        await pool.generate(PROMPT, on_version_change="again")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="raise or return"):
        await pool.generate_many([PROMPT], on_error="log")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tokenize it first"):
        await pool.generate("one two three")  # type: ignore[arg-type]
    for prompt in ({5, 6}, {5: 6}, (each for each in PROMPT), 5, np.array(5), None):
        with pytest.raises(TypeError, match="a list, an array or a tensor"):
            await pool.generate(prompt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="generate_many"):
        await pool.generate(np.array([PROMPT, PROMPT]))
    with pytest.raises(TypeError, match=r"not a generator: pass list\(prompts\), or use as_compl"):
        await pool.generate_many(each for each in [PROMPT])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sampling\.n"):  # told once, not by each result
        await pool.generate_many([PROMPT] * 3, sampling={"n": 0})
    assert worker.bodies == []
    for wrong in ("max_failures", "max_staleness", "silent_seconds", "deadline_seconds"):
        options: dict[str, Any] = {wrong: -1}
        with pytest.raises(ValueError, match=wrong):
            AsyncRolloutPool.from_urls([worker.url], **options)
    nowhere: list[str] = []
    for urls in (nowhere, worker.url):
        with pytest.raises(ValueError, match="list of one URL or more"):
            AsyncRolloutPool.from_urls(urls)


@pytest.mark.parametrize(
    "prompt",
    [
        np.array(PROMPT),
        list(np.array(PROMPT)),
        [1, np.int32(2), 3],
        range(1, 4),
        array("i", PROMPT),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
async def test_numbers_may_be_of_any_kind(
    pool: AsyncRolloutPool, worker: ScriptedWorker, prompt: Prompt
) -> None:
    worker.steps = [tokens([1], "stop")]
    numbers = {"max_tokens": np.int64(4), "temperature": np.float32(0.5), "seed": np.uint8(3)}
    listed = {"stop_token_ids": [np.int64(9)], "logit_bias": {np.int64(7): np.float64(1.5)}}
    plain: dict[str, Any] = {"priority": np.int64(2), "deadline_seconds": np.float32(9)}
    await pool.generate(prompt, sampling={**numbers, **listed}, **plain)
    sent = worker.bodies[0]
    assert sent["token_ids"] == PROMPT
    assert sent["priority"] == 2
    assert sent["sampling"] == {
        "max_tokens": 4,
        "temperature": 0.5,
        "seed": 3,
        "stop_token_ids": [9],
        "logit_bias": {"7": 1.5},
    }


async def test_a_request_without_a_deadline_has_time_for_32k_tokens(worker: ScriptedWorker) -> None:
    worker.steps = [tokens([1], "stop")]
    asked = GenerateRequest(token_ids=(1,), deadline_seconds=60)
    async with AsyncRolloutPool.from_urls([worker.url]) as pool:
        await pool.generate(PROMPT)
        await pool.generate(GenerateRequest(token_ids=(1,)))
        await pool.generate(asked)
    async with AsyncRolloutPool.from_urls([worker.url], deadline_seconds=90) as pool:
        await pool.generate(PROMPT)
    sent = [round(body["deadline_seconds"]) for body in worker.bodies]
    assert sent == [7200, 7200, 60, 90]
    assert sent[0] >= 32768 / 5


async def test_a_prompt_that_can_not_be_sent_costs_no_other(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [tokens([1], "stop")]
    unusable: list[Any] = [[], "one two three", {1, 2}, [[1], [2]], [1.5], None]
    told: list[tuple[int, int]] = []
    with pytest.raises(ManyFailed, match=r"6 of 8.*token_ids") as error:
        await pool.generate_many([PROMPT, *unusable, PROMPT], progress=lambda *at: told.append(at))
    assert told == [(ended, 8) for ended in range(1, 9)]
    good, *bad, other = error.value.results
    for each in bad:
        assert isinstance(each, RequestRefused)
        assert (each.status, each.slug) == (422, "invalid-request")
    assert isinstance(good, GenerateResult)
    assert isinstance(other, GenerateResult)
    assert len(worker.bodies) == 2


async def test_connections_to_a_member_that_left_end_with_its_last_request(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    leave = asyncio.Event()
    worker.steps = [after(leave.wait, tokens([1], "stop"))]
    running = asyncio.create_task(pool.generate(PROMPT, sampling=END))
    await until(lambda: len(worker.bodies) == 1, what="the request")
    pool._set_members([])
    assert worker.url in pool._connections._clients
    leave.set()
    await running
    assert pool._connections._clients == {}


async def test_each_request_has_a_client_of_its_own_and_the_last_one_used_comes_first() -> None:
    connections, url = MemberClients(), "http://worker"
    with connections.client_for(url) as first:
        with connections.client_for(url) as second:
            assert second is not first
        with connections.client_for(url) as again:
            assert again is second
    with connections.client_for(url) as last:
        assert last is first, "its connection is the least likely to have expired"
    trusted = [trusted_authorities(environment=True) for _ in range(2)]
    assert trusted[0] is trusted[1], "loading them takes some 20 ms"
    connections.drop_origin(url)
    await connections.close()
    assert first.is_closed
    assert second.is_closed


async def test_prometheus_gets_attempts_and_requests(worker: ScriptedWorker) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    worker.steps = [tokens([1], None), tokens([2], "stop"), problem(422, "unsupported")]
    hook = PrometheusHook("math", registry)
    async with AsyncRolloutPool.from_urls([worker.url], hook=hook) as pool:
        await pool.generate(PROMPT, sampling=END)
        with pytest.raises(RequestRefused):
            await pool.generate(PROMPT)
    page = generate_latest(registry).decode()
    for outcome in ("broken", "finished", "refused"):
        assert f'client_attempts_total{{outcome="{outcome}",pool="math"}} 1.0' in page
    for outcome in ("ok", "RequestRefused"):
        assert f'client_requests_total{{outcome="{outcome}",pool="math"}} 1.0' in page
    assert 'rollout_client_tokens_total{pool="math"} 2.0' in page
    assert 'rollout_client_members{pool="math",state="present"} 1.0' in page


# The token of the data ports.


async def test_a_data_token_is_never_quoted(worker: ScriptedWorker) -> None:
    worker.steps = [tokens([5], "stop")]
    async with AsyncRolloutPool.from_urls([worker.url], data_token="s3cret\n") as pool:
        await pool.generate(PROMPT)
    assert {each.get("Authorization") for each in worker.server.headers} == {"Bearer s3cret"}
    odd = AsyncRolloutPool.from_urls([worker.url], data_token=lambda: "s3cret\ns3cret")
    async with odd:
        with pytest.raises(NoReplica, match="data_token can't be used: it is empty or has") as told:
            await odd.generate(PROMPT, deadline_seconds=0.2)
    assert "s3cret" not in str(told.value)


async def test_a_data_token_whose_file_is_replaced_is_read_again(
    worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.steps = [tokens([5], "stop")]
    file = tmp_path / "token"

    def read_token() -> str:
        try:
            return file.read_text()
        finally:
            file.write_text("s3cret")

    async with AsyncRolloutPool.from_urls([worker.url], data_token=read_token) as pool:
        assert (await pool.generate(PROMPT)).outputs[0].token_ids == (5,)


async def test_certificates_of_the_environment_matter_to_https_alone(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    trusted_authorities.cache_clear()
    worker.steps = [tokens([5], "stop")]
    async with AsyncRolloutPool.from_urls([worker.url]) as pool:
        assert (await pool.generate(PROMPT)).outputs[0].token_ids == (5,)
    secure = AsyncRolloutPool.from_urls([worker.url.replace("http:", "https:")])
    async with secure:
        with pytest.raises(NoReplica, match="SSL_CERT_FILE or SSL_CERT_DIR can't be used"):
            await secure.generate(PROMPT, deadline_seconds=0.3)
