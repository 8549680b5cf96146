"""A data port that wants a token: from whom, for what, and what it answers without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn

from rollout_client import AsyncRolloutPool
from rollout_client.errors import RolloutError
from rollout_worker.ports.data_routes import make_data_app
from rollout_worker.settings import InvalidSettings
from tests.support.unit.asgi import Answer, call
from tests.support.unit.tiny_worker import TinyWorker, tiny_worker
from tests.support.waiting import until

SECRET = "s3cret"


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[TinyWorker]:
    file = tmp_path / "token"
    file.write_text(SECRET + "\n")
    async with tiny_worker(tmp_path, "--data-token-file", str(file)) as worker:
        worker.engine.free = True
        yield worker


async def asked(worker: TinyWorker, authorization: str | None, path: str = "/v1/info") -> Answer:
    headers = {} if authorization is None else {"authorization": authorization}
    return await call(make_data_app(worker.worker), path, method="GET", headers=headers)


@pytest.mark.parametrize("given", [None, "Bearer other", "Basic s3cret", "Bearer "])
async def test_a_request_without_the_token_is_refused_with_the_fix(
    guarded: TinyWorker, given: str | None
) -> None:
    answer = await asked(guarded, given)
    assert (answer.status, answer.slug) == (401, "unauthenticated")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "`data_token` of rollout_client's pools" in answer.body["detail"]
    page = guarded.worker.render_metrics().decode()
    assert 'rollout_worker_refused_total{reason="unauthenticated"} 1.0' in page


async def test_openais_clients_are_shown_the_fix(guarded: TinyWorker) -> None:
    answer = await asked(guarded, None, "/v1/models")
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert "the API key of OpenAI's clients" in answer.body["error"]["message"]


async def test_the_token_opens_every_route(guarded: TinyWorker) -> None:
    app = make_data_app(guarded.worker)
    for path in app.openapi()["paths"]:
        is_open = path in ("/health", "/ready", "/metrics")
        assert (await asked(guarded, None, path)).status == (200 if is_open else 401), path
        assert (await asked(guarded, f"Bearer {SECRET}", path)).status != 401, path
    body = json.dumps({"token_ids": [5], "sampling": {"max_tokens": 3}}).encode()
    answer = await call(app, "/v1/generate", body, headers={"authorization": f"Bearer {SECRET}"})
    assert answer.status == 200
    assert (await call(app, "/v1/generate", body)).status == 401


def test_a_file_that_is_empty_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("")
    worker = TinyWorker(tmp_path, ("--data-token-file", str(tmp_path / "token")))
    with pytest.raises(
        InvalidSettings, match=r"--data-token-file .* is empty: write a secret into it"
    ):
        make_data_app(worker.worker)


async def test_the_client_sends_it(guarded: TinyWorker) -> None:
    """Over HTTP; a function's token can be rotated."""
    server = uvicorn.Server(
        uvicorn.Config(make_data_app(guarded.worker), port=0, log_level="error", lifespan="off")
    )
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started, what="the server")
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        for token in (SECRET, lambda: SECRET):
            async with AsyncRolloutPool.from_urls([url], data_token=token) as pool:
                result = await pool.generate([5, 6], sampling={"max_tokens": 3})
                assert len(result.token_ids) == 3
        async with AsyncRolloutPool.from_urls([url]) as pool:
            with pytest.raises(RolloutError, match="data_token"):
                await pool.generate([5, 6], sampling={"max_tokens": 3}, deadline_seconds=20)
    finally:
        server.should_exit = True
        await serving
