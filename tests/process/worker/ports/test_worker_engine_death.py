"""The moment in which an engine dies, before the supervisor has looked: every route says so, none says 500."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from pathlib import Path

import pytest
from fastapi import FastAPI

from rollout_worker.engine import EngineCrashed, EngineRequest
from rollout_worker.lifecycle import supervisor
from rollout_worker.openai.model_text import ModelText
from rollout_worker.ports.callers.auth import AllowAnyone
from rollout_worker.ports.control_routes import make_control_app
from rollout_worker.ports.data_routes import make_data_app
from rollout_worker.schemas import Lifecycle
from rollout_worker.service import WorkerService
from tests.support.unit.asgi import DATA_PATHS, GOOD_BODIES, call
from tests.support.unit.tiny_engine import TinyEngine
from tests.support.unit.tiny_worker import TinyWorker, refused, settings, tiny_worker
from tests.support.waiting import until

READ = (
    *("/v1/state", "/v1/info", "/v1/weights", "/v1/weights/dtypes", "/v1/models"),
    *("/v1/models/{model}", "/health", "/ready", "/metrics"),
)
ROUTES = (*(("post", path) for path in GOOD_BODIES), *(("get", path) for path in READ))


@pytest.fixture
async def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TinyWorker]:
    """A worker whose engine is dead, and that does not know it."""
    monkeypatch.setattr(supervisor, "WATCH_INTERVAL_SECONDS", 60)
    missing = {"make_decoder": str, "render_conversation": [5, 6], "chat_template": ""}
    for name, value in missing.items():  # this model has no tokenizer
        monkeypatch.setattr(ModelText, name, _giving(value))
    async with tiny_worker(tmp_path, "--restart-delays", "60") as worker:
        await asyncio.sleep(0.05)  # the supervisor watches
        gone = EngineCrashed("it died")

        def validate(request: EngineRequest) -> None:
            raise gone

        monkeypatch.setattr(worker.engine, "validate", validate)
        worker.engine.wrong = "it died"
        yield worker


def _giving(value: object) -> Callable[..., Awaitable[object]]:
    async def give(*_: object, **__: object) -> object:
        return value

    return give


def apps_of(worker: WorkerService) -> tuple[FastAPI, FastAPI]:
    """Those of the data port and of the control port."""
    return make_data_app(worker), make_control_app(worker, AllowAnyone())


@cache
def routes_of_ports() -> list[set[tuple[str, str]]]:
    """Method and path of each route of both ports, by their documents, which take time to make."""
    return [
        {(method, path) for path, methods in app.openapi()["paths"].items() for method in methods}
        for app in apps_of(WorkerService(settings()))
    ]


@pytest.mark.parametrize("path", DATA_PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_in_that_moment_is_refused_as_failed(
    dying: TinyWorker, path: str, stream: bool
) -> None:
    body = json.dumps({**GOOD_BODIES[path], "stream": stream}).encode()
    answer = await call(make_data_app(dying.worker), path, body)
    assert answer.status == 503, answer.content
    said = b"the engine failed and is being restarted; nothing was generated"
    assert said in answer.content
    assert answer.headers["retry-after"] == "5"
    assert not dying.runtime.is_alive, "and the supervisor hears of it"
    await dying.reaches(Lifecycle.FAILED)
    assert dying.runtime.last_error == "it died"
    assert 'refused_total{reason="failed"} 1.0' in dying.worker.render_metrics().decode()


@pytest.mark.parametrize(
    ("method", "path"), [*ROUTES], ids=lambda each: each if isinstance(each, str) else ""
)
async def test_no_route_of_either_port_answers_500(
    dying: TinyWorker, method: str, path: str
) -> None:
    apps = zip(apps_of(dying.worker), routes_of_ports(), strict=True)
    (app,) = (app for app, routes in apps if (method, path) in routes)
    body = json.dumps(GOOD_BODIES[path]).encode() if method == "post" else b""
    where = path.replace("{model}", "model")
    answer = await asyncio.wait_for(call(app, where, body, method.upper()), 30)
    assert answer.status not in (422, 500), answer.content
    if answer.status >= 400:
        assert answer.body["type" if "type" in answer.body else "error"], "it says why"


def test_all_routes_are_tried() -> None:
    data, control = routes_of_ports()
    assert data | control == set(ROUTES)


async def test_an_engine_that_knows_of_its_end_says_so_at_once(dying: TinyWorker) -> None:
    dying.engine.on_end("its thread ended")
    with refused("failed"):
        await dying.begin_stage(1, 7)
    await dying.reaches(Lifecycle.FAILED)
    assert dying.runtime.last_error == "its thread ended"


async def test_an_engine_that_was_replaced_ends_no_other_one(tmp_path: Path) -> None:
    async with tiny_worker(tmp_path) as worker:
        first: TinyEngine = worker.engine
        first.wrong = "it died"
        await until(lambda: len(worker.engines) == 2, what="the next engine")
        await worker.reaches(Lifecycle.ACTIVE)
        first.on_end("later")
        assert worker.runtime.is_alive
