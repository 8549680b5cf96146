"""Whoever changes a worker stands in its log: every verb of the control port names its caller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from rollout_worker.ports.auth import AccessRight, Authorizer
from rollout_worker.ports.control_routes import make_control_app
from tests.support.unit.pushing import Version, publish, pushed_worker
from tests.support.unit.tiny_worker import TinyWorker
from tests.support.waiting import until

NEXT = {"epoch": 1, "version": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/pause": {"mode": "abort"},
    "/v1/resume": {},
    "/v1/sleep": {"mode": "abort", "tags": ["kv_cache"]},
    "/v1/wake": {},
    "/v1/abort": {"request_ids": ["a", "b"]},
    "/v1/cache/reset": {},
    "/v1/require": {"epoch": 1, "min_version": 1},
    "/v1/weights/stage": NEXT,
    "/v1/weights/discard": NEXT,
    "/v1/weights/offer": NEXT,
    "/v1/weights/commit": NEXT,
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


async def keep_pushed(worker: TinyWorker) -> None:
    """Commit pushed weights as (1, 1)."""
    await publish(worker, 1, Version(7))


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
        await keep_pushed(worker)
    caplog.clear()
    caplog.set_level("INFO")
    transport = httpx.ASGITransport(make_control_app(worker.worker, Everyone()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.post(path, json=body)
    assert answer.status_code in (200, 202), answer.text
    assert "'system:serviceaccount:rl:trainer'" in caplog.text
    slot = worker.updates.slot
    await until(lambda: slot is None or slot.to_view().phase != "Staging", what="the stage to end")
