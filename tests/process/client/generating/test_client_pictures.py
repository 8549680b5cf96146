"""Pictures between client and workers: bytes once, then hashes, again after 409, and elsewhere."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import Any

import pytest

from rollout_client import AsyncRolloutPool, GenerateRequest, RequestRefused
from tests.support.unit.scripted import END, PROMPT, ScriptedWorker, after, problem, tokens

DATA = b"a picture"
REF = {"ref": "sha256:" + hashlib.sha256(DATA).hexdigest()}
SENT = {"data": base64.b64encode(DATA).decode()}


def images(worker: ScriptedWorker) -> list[Any]:
    """What each request to a worker had."""
    return [body["multimodal"]["images"] for body in worker.bodies]


async def test_bytes_are_sent_once_then_the_hash(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [tokens([1, 2], "stop")]
    for _ in range(3):
        await pool.generate(PROMPT, images=[DATA, DATA], sampling=END)
    assert images(worker) == [[SENT, REF], [REF, REF], [REF, REF]]


async def test_samples_of_a_prompt_send_its_picture_once(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [tokens([1, 2], "stop", pause=0.2)]
    results = await asyncio.gather(
        pool.generate(PROMPT, images=[DATA], sampling={**END, "n": 4}),
        *(pool.generate(PROMPT, images=[DATA], sampling=END) for _ in range(4)),
    )
    assert len(results) == 5
    assert sorted(map(str, images(worker))) == sorted(map(str, [[SENT], *[[REF]] * 7]))


async def test_a_worker_that_forgot_it_gets_the_bytes_again(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [
        tokens([1], "stop"),
        problem(409, "unknown-media", refs=[REF["ref"]]),
        tokens([2], "stop"),
    ]
    await pool.generate(PROMPT, images=[DATA], sampling=END)
    result = await pool.generate(PROMPT, images=[DATA], sampling=END)
    assert result.token_ids == (2,)
    assert images(worker) == [[SENT], [REF], [SENT]]
    assert [each.outcome for each in result.attempts] == ["finished"], "it is one attempt"


async def test_a_picture_of_which_there_are_no_bytes_is_refused(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [problem(409, "unknown-media")]
    request = GenerateRequest.model_validate({"token_ids": PROMPT, "multimodal": {"images": [REF]}})
    with pytest.raises(RequestRefused) as refused:
        await pool.generate(request)
    assert (refused.value.slug, len(worker.bodies)) == ("unknown-media", 1)


async def test_a_worker_that_always_forgets_ends_the_request(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [problem(409, "unknown-media")]
    with pytest.raises(RequestRefused):
        await pool.generate(PROMPT, images=[DATA])
    assert images(worker) == [[SENT], [SENT]]


async def test_an_output_goes_on_elsewhere_with_its_pictures(
    workers: list[ScriptedWorker],
) -> None:
    one, other = workers

    async def switch() -> None:
        for each in workers:
            each.steps = [tokens([3], "stop")]

    for each in workers:
        each.says_ends(99)
        each.steps = [after(switch, tokens([1, 2], None))]
    urls = [each.url for each in workers]
    async with AsyncRolloutPool.from_urls(urls, max_failures=1) as pool:
        result = await pool.generate(PROMPT, images=[DATA], sampling=END)
    assert result.token_ids == (1, 2, 3)
    bodies = sorted((*one.bodies, *other.bodies), key=lambda body: len(body["token_ids"]))
    assert [len(one.bodies), len(other.bodies)] == [1, 1]
    assert [body["token_ids"] for body in bodies] == [PROMPT, [*PROMPT, 1, 2]]
    assert [body["multimodal"]["images"] for body in bodies] == [[SENT], [SENT]]


async def test_scores_and_whole_requests_have_pictures(
    pool: AsyncRolloutPool, worker: ScriptedWorker
) -> None:
    worker.steps = [problem(422, "unsupported")]
    with pytest.raises(RequestRefused):
        await pool.score(PROMPT, images=[DATA])
    assert images(worker) == [[SENT]]
    assert worker.bodies[0]["sampling"]["max_tokens"] == 0
