"""Hundreds of requests, as many at once as may queue: nothing is lost, nothing mixed up, and probes stay quick."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.engine.contracts import Served, pieces, sound
from tests.support.engine.engine_kinds import QUEUE
from tests.support.engine.reference import Reference
from tests.support.engine.workers import events

AT_ONCE = QUEUE


def work(number: int) -> dict[str, Any]:
    """A request of its own length, prompt and kind."""
    rng = random.Random(number)
    return {
        "request_id": f"load-{number}",
        "token_ids": rng.choices(range(3, 4000), k=rng.choice((1, 4, 9, 30, 90))),
        "sampling": {"max_tokens": rng.randint(1, 12), "ignore_eos": True},
        "stream": number % 4 == 0,
    }


async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    if body["stream"]:
        return pieces(list(events(iter(answer.text.splitlines()))), 0)
    found = answer.json()
    assert found["request_id"] == body["request_id"]
    assert found["usage"]["prompt_tokens"] == len(body["token_ids"])
    [output] = found["outputs"]
    return dict(output)


async def all_of_it(url: httpx.URL, count: int) -> list[dict[str, Any]]:
    limits = httpx.Limits(max_connections=AT_ONCE)
    places = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(
        base_url=url, timeout=120, limits=limits, trust_env=False
    ) as client:

        async def limited(number: int) -> dict[str, Any]:
            async with places:
                return await one(client, work(number))

        return await asyncio.gather(*(limited(n) for n in range(count)))


@contextlib.contextmanager
def probing(worker: Served) -> Iterator[list[float]]:
    """How long `/health` took, again and again while the block runs; like a kubelet, from outside."""
    taken: list[float] = []
    over = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=worker.data.base_url, trust_env=False, timeout=30) as client:
            while not over.wait(0.05):
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                taken.append(time.monotonic() - began)

    done = worker.in_background(probe)
    try:
        yield taken
    finally:
        over.set()
        done.result(60)


@pytest.mark.parametrize("count", [320, pytest.param(3000, marks=pytest.mark.soak)])
def test_many_requests(worker: Served, reference: dict[int, Reference], count: int) -> None:
    before = worker.state()
    began = time.monotonic()
    with probing(worker) as probes:
        outputs = asyncio.run(all_of_it(worker.data.base_url, count))
    seconds = time.monotonic() - began
    assert len(outputs) == count
    for number, output in enumerate(outputs):
        body = work(number)
        sound(output)
        assert output["stop_reason"] == "length"
        assert len(output["token_ids"]) == body["sampling"]["max_tokens"]
        if number % 4 == 0:  # nobody got somebody else's tokens
            expected = reference[1].raw_logprobs(body["token_ids"], output["token_ids"])
            assert output["logprobs"] == pytest.approx(expected, abs=1e-4)
    after = worker.state()
    assert after["in_flight"] == after["queued"] == 0
    assert after["restarts"] == before["restarts"]
    slowest = sorted(probes)[int(len(probes) * 0.95)]
    # 100 ms on an idle machine; tests share theirs.
    assert slowest < 0.5, f"p95 of /health {slowest * 1e3:.0f} ms in {seconds:.0f} s of load"
