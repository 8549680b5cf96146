"""Reviews of callers: few, each once, and whoever invents tokens keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import certifi
import pytest_asyncio
from aiohttp import web

from rollout_common.wire.problems import ProblemError
from rollout_worker.ports.callers.auth import CONTROL_WORKER, SEE_STATE
from rollout_worker.ports.callers.kubernetes_auth import KubernetesReview
from rollout_worker.ports.callers.token_reviews import (
    MAX_ASKED,
    MAX_CACHED,
    MAX_SHARING,
    MAX_WAITING,
    MAX_WAITING_EACH,
    ReviewQueue,
    TokenReviews,
)
from rollout_worker.ports.settings import ACCEPTED_SECONDS, DENIED_SECONDS, RENEW_SECONDS
from tests.support.loopback import Loopback, loopback
from tests.support.unit.tiny_worker import refused, settings
from tests.support.waiting import until

TOKENS = "/apis/authentication.k8s.io/v1/tokenreviews"
RIGHTS = "/apis/authorization.k8s.io/v1/namespaces/rl/localsubjectaccessreviews"
REVIEW_SECONDS = 0.01


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Loopback]:
    """An API server that takes some time, and knows the tokens that begin with `good`."""

    async def token_review(request: web.Request) -> web.Response:
        await asyncio.sleep(REVIEW_SECONDS)
        spec = (await request.json())["spec"]
        good = spec["token"].startswith("good")
        status = {"authenticated": good, "audiences": spec["audiences"], "user": {}}
        return web.json_response({"status": {**status, "user": {"username": spec["token"]}}})

    async def access_review(request: web.Request) -> web.Response:
        await asyncio.sleep(REVIEW_SECONDS)
        return web.json_response({"status": {"allowed": True}})

    async with loopback() as server:
        server.answers["POST", TOKENS] = token_review
        server.answers["POST", RIGHTS] = access_review
        yield server


@pytest_asyncio.fixture
async def review(api: Loopback, tmp_path: Path) -> AsyncIterator[KubernetesReview]:
    (tmp_path / "token").write_text("own")
    pool = ["--auth", "kubernetes", "--pool", "p", "--namespace", "rl"]
    kube = ["--kube-api-url", api.url, "--kube-ca", certifi.where()]
    found = KubernetesReview(settings(*pool, *kube, "--kube-token-file", str(tmp_path / "token")))
    yield found
    await found.close()


async def outcome(review: KubernetesReview, token: str, address: str = "") -> int | str:
    try:
        return await review.check_caller(f"Bearer {token}", SEE_STATE, address)
    except ProblemError as refusal:
        return refusal.problem.status


async def test_equal_first_calls_make_one_review_of_each_kind(
    api: Loopback, review: KubernetesReview
) -> None:
    assert await asyncio.gather(*(outcome(review, "good") for _ in range(100))) == ["good"] * 100
    assert [path for _, path, _ in api.requests] == [TOKENS, RIGHTS]
    await review.check_caller("Bearer good", CONTROL_WORKER)
    assert [path for _, path, _ in api.requests] == [TOKENS, RIGHTS, RIGHTS]


async def test_invented_tokens_keep_nobody_waiting(api: Loopback, review: KubernetesReview) -> None:
    assert await outcome(review, "good operator", "10.0.0.1") == "good operator"
    flood = [asyncio.create_task(outcome(review, f"x{n}", "10.0.0.9")) for n in range(3000)]
    await until(lambda: api.at_once, what="the flood")
    began = time.monotonic()
    assert await outcome(review, "good operator", "10.0.0.1") == "good operator"
    assert await outcome(review, "good trainer", "10.0.0.2") == "good trainer"
    assert time.monotonic() - began < 5, "not behind 3,000 reviews, which take longer"
    outcomes = await asyncio.gather(*flood)
    assert set(outcomes) == {401, 503}
    assert outcomes.count(401) <= MAX_WAITING_EACH
    assert api.most_at_once <= MAX_ASKED


async def test_many_addresses_at_once_are_turned_away_too(
    api: Loopback, review: KubernetesReview
) -> None:
    flood = [outcome(review, f"x{n}", f"10.0.{n % 100}.9") for n in range(1000)]
    outcomes = await asyncio.gather(*flood)
    assert outcomes.count(401) <= MAX_WAITING
    assert len(api.requests) == outcomes.count(401)
    assert await outcome(review, "good") == "good", "afterwards there is room again"


class Asked:
    """A question with a clock; `good` is the present answer."""

    def __init__(self) -> None:
        self.now, self.times, self.good = 0.0, 0, True
        self.reviews: TokenReviews[bool] = TokenReviews(
            ReviewQueue(), accepts=bool, clock=lambda: self.now
        )
        self.go = asyncio.Event()
        self.go.set()

    async def question(self) -> bool:
        self.times += 1
        await self.go.wait()
        return self.good

    async def ask(self, key: str = "k") -> bool:
        return await self.reviews.get(key, "", self.question)


async def test_accepted_and_denied_answers_last_differently() -> None:
    asked = Asked()
    assert await asked.ask()
    asked.good = False
    assert not await asked.ask("other")
    asked.now = DENIED_SECONDS + 0.1
    await asked.ask("other")
    await asked.ask()
    assert asked.times == 3, "the denied one is asked for again"


async def test_denied_answers_displace_no_accepted_one() -> None:
    asked = Asked()
    assert await asked.ask()
    asked.good = False
    for n in range(MAX_CACHED + 10):
        assert not await asked.ask(f"x{n}")
    assert await asked.ask()
    assert asked.times == MAX_CACHED + 11


async def test_an_accepted_answer_is_renewed_while_it_serves() -> None:
    asked = Asked()
    assert await asked.ask()
    asked.now, asked.good = ACCEPTED_SECONDS - RENEW_SECONDS + 1, False
    asked.go.clear()
    assert await asked.ask(), "it still serves"
    assert await asked.ask()
    asked.go.set()
    await until(lambda: asked.times == 2, what="one renewal")
    await asyncio.sleep(0)
    assert not await asked.ask(), "and what the renewal says counts at once"


async def test_who_leaves_takes_nobody_along() -> None:
    asked = Asked()
    asked.go.clear()
    first, second = asyncio.create_task(asked.ask()), asyncio.create_task(asked.ask())
    await until(lambda: asked.times, what="the question")
    first.cancel()
    asked.go.set()
    assert await second
    assert asked.times == 1


async def test_few_share_a_review() -> None:
    asked = Asked()
    asked.go.clear()
    sharing = [asyncio.create_task(asked.ask()) for _ in range(MAX_SHARING)]
    await until(lambda: asked.times, what="the question")
    with refused("auth-unavailable"):
        await asked.ask()
    asked.go.set()
    assert all(await asyncio.gather(*sharing))


async def test_a_failure_is_not_remembered() -> None:
    asked = Asked()

    async def fail() -> bool:
        raise ProblemError("auth-unavailable", "the API server is away")

    with refused("auth-unavailable"):
        await asked.reviews.get("k", "", fail)
    assert await asked.ask()
