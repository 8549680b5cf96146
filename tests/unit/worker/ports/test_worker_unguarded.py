"""The control port without authentication: the machine's own callers, and no page in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_worker.ports.auth import AllowAnyone
from rollout_worker.ports.control_routes import make_control_app
from rollout_worker.schemas import Lifecycle
from tests.support.unit.asgi import call
from tests.support.unit.tiny_worker import tiny_worker

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
