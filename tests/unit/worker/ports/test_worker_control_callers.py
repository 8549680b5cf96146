"""Callers of the control port: whoever changes a worker stands in its log, and no web page does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from rollout_worker.ports.callers.auth import AccessRight, AllowAnyone, Authorizer
from rollout_worker.ports.control_routes import make_control_app
from rollout_worker.schemas import Lifecycle
from tests.support.unit.asgi import DATA_PATHS, GOOD_BODIES, call
from tests.support.unit.pushing import Version, publish, pushed_worker
from tests.support.unit.tiny_worker import TinyWorker, tiny_worker
from tests.support.waiting import until

BODIES: dict[str, dict[str, Any]] = {
    **{path: body for path, body in GOOD_BODIES.items() if path not in DATA_PATHS},
    "/v1/pause": {"mode": "abort"},
    "/v1/sleep": {"mode": "abort", "tags": ["kv_cache"]},
}


class Everyone(Authorizer):
    """Lets everybody in, under one name."""

    async def check_caller(
        self, authorization: str | None, right: AccessRight, address: str = ""
    ) -> str:
        return "system:serviceaccount:rl:trainer"


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[TinyWorker]:
    async with pushed_worker(tmp_path) as worker:
        yield worker


def test_no_verb_is_missing_here(tmp_path: Path) -> None:
    app = make_control_app(TinyWorker(tmp_path, ()).worker, Everyone())
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    assert {route.path for route in routes if "POST" in (route.methods or ())} == set(BODIES)


@pytest.mark.parametrize("path", BODIES)
async def test_a_verb_is_logged_with_its_caller(
    worker: TinyWorker, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = dict(BODIES[path])
    if path in ("/v1/weights/commit", "/v1/weights/discard"):
        await worker.stage(1, 7)
    if path == "/v1/weights/stage":
        body["source"] = {"path": str(worker.weights(7))}
    if path == "/v1/weights/offer":
        await publish(worker, 1, Version(7))
    caplog.clear()
    caplog.set_level("INFO")
    app = make_control_app(worker.worker, Everyone())
    answer = await call(app, path, json.dumps(body).encode())
    assert answer.status in (200, 202), answer.content
    assert "'system:serviceaccount:rl:trainer'" in caplog.text
    slot = worker.updates.slot
    await until(lambda: slot is None or slot.to_view().phase != "Staging", what="the stage to end")


# Without authentication: the machine's own callers, and no page in a browser.

JSON = "application/json"


@pytest.mark.parametrize(
    ("headers", "status", "slug"),
    [
        ({"content-type": "text/plain"}, 415, "not-json"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "not-json"),
        ({"content-type": ""}, 415, "not-json"),
        ({"content-type": JSON, "origin": "https://evil.example"}, 403, "forbidden"),
        ({"content-type": JSON, "origin": "http://localhost:3000"}, 403, "forbidden"),
        ({"content-type": JSON, "origin": "null"}, 403, "forbidden"),
        ({"content-type": JSON, "host": "evil.example"}, 403, "forbidden"),
        ({"content-type": JSON, "host": "127.0.0.1.evil.example:8001"}, 403, "forbidden"),
        ({"content-type": JSON, "host": ""}, 403, "forbidden"),
    ],
    ids=str,
)
async def test_a_page_changes_nothing(
    tmp_path: Path, headers: dict[str, str], status: int, slug: str
) -> None:
    async with tiny_worker(tmp_path) as tiny:
        app = make_control_app(tiny.worker, AllowAnyone())
        for body in (b"", b'{"mode": "abort"}'):
            answer = await call(app, "/v1/pause", body, headers=headers)
            assert (answer.status, answer.slug) == (status, slug)
        assert tiny.state is Lifecycle.ACTIVE
        assert not tiny.runtime.is_held


async def test_a_call_without_a_body_need_not_say_what_it_is(tmp_path: Path) -> None:
    async with tiny_worker(tmp_path) as tiny:
        app = make_control_app(tiny.worker, AllowAnyone())
        assert (await call(app, "/v1/pause")).status == 200
        assert (await call(app, "/v1/resume", headers={"content-length": "0"})).status == 200
        for said in ({"content-length": "17"}, {"transfer-encoding": "chunked"}):
            answer = await call(app, "/v1/pause", b'{"mode": "abort"}', headers=said)
            assert (answer.status, answer.slug) == (415, "not-json"), said
        for origin in ("null", "https://evil.example"):
            answer = await call(app, "/v1/pause", headers={"origin": origin})
            assert (answer.status, answer.slug) == (403, "forbidden")
        assert not tiny.runtime.is_held


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8001", "[::1]:8001", "127.0.0.2:1"])
async def test_the_machines_own_callers_are_served(tmp_path: Path, host: str) -> None:
    async with tiny_worker(tmp_path) as tiny:
        app = make_control_app(tiny.worker, AllowAnyone())
        said = {"host": host, "content-type": "application/json; charset=utf-8"}
        assert (await call(app, "/v1/pause", b"{}", headers=said)).status == 200
        assert (
            await call(app, "/v1/resume", headers={**said, "origin": f"http://{host}"})
        ).status == 200
        assert (await call(app, "/v1/state", method="GET", headers={"host": host})).status == 200
        foreign = {"host": host, "origin": "https://evil.example"}
        assert (await call(app, "/v1/state", method="GET", headers=foreign)).status == 403
