"""What the client makes of an API server that is away, odd, busy or has new credentials."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from rollout_operator.kube.credentials import LoginFailed, load_connection_info
from rollout_operator.kube.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubeError,
    NotFound,
    Unauthorized,
    Unavailable,
    from_answer,
)
from rollout_operator.kube.kube_client import KubeClient
from tests.support.loopback import Loopback, kubeconfig, loopback

POD = "/api/v1/namespaces/rl/pods/a"


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loopback]:
    async with loopback() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        yield server


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (400, "BadRequest", Invalid),
        (401, "Unauthorized", Unauthorized),
        (403, "Forbidden", Forbidden),
        (404, "NotFound", NotFound),
        (409, "Conflict", Conflict),
        (409, "AlreadyExists", AlreadyExists),
        (410, "Expired", Gone),
        (418, "", KubeError),
        (422, "Invalid", Invalid),
        (429, "TooManyRequests", Unavailable),
        (500, "InternalError", Unavailable),
        (503, "", Unavailable),
    ],
)
def test_every_status_has_its_error(status: int, reason: str, kind: type[KubeError]) -> None:
    body = f'{{"kind": "Status", "reason": "{reason}", "message": "so it is"}}'.encode()
    error = from_answer(status, body, "get pods rl/a", "7")
    assert type(error) is kind
    assert error.status == status
    assert error.message == "get pods rl/a: so it is"
    assert error.retry_after == 7
    assert str(error) == f"{reason or f'HTTP{status}'}: get pods rl/a: so it is"


@pytest.mark.parametrize("body", [b"<html>gateway</html>", b"[]", b"", b"\xff\xfe"])
def test_an_answer_of_a_proxy_is_told_as_it_came(body: bytes) -> None:
    error = from_answer(502, body, "get pods rl/a", "Wed, 21 Oct 2026 07:28:00 GMT")
    assert isinstance(error, Unavailable)
    assert error.retry_after is None
    assert error.message.startswith("get pods rl/a: ")
    assert len(error.message) > len("get pods rl/a: ")


async def test_a_refusal_to_answer_now_says_for_how_long(api: Loopback) -> None:
    api.answer("GET", POD, {"reason": "TooManyRequests"}, 429, **{"Retry-After": "3"})
    async with KubeClient() as kube:
        with pytest.raises(Unavailable) as error:
            await kube.get("pods", "rl", "a")
    assert error.value.retry_after == 3


async def test_a_dead_server_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "http://127.0.0.1:1")))
    async with KubeClient() as kube:
        with pytest.raises(Unavailable, match=r"get pods rl/a: .*127"):
            await kube.get("pods", "rl", "a")


async def test_a_write_that_hangs_ends_before_the_lease_does(api: Loopback) -> None:
    api.delay("POST", "/api/v1/namespaces/rl/pods", {}, 30)
    async with KubeClient(write_seconds=lambda: 0.2) as kube:
        began = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable):
            await kube.create("pods", {"metadata": {"namespace": "rl", "name": "a"}})
        assert asyncio.get_running_loop().time() - began < 2


@pytest.mark.parametrize("body", ["no json", "[1]"])
async def test_a_wellmeant_answer_that_is_no_object_is_an_error(api: Loopback, body: str) -> None:
    api.answer("GET", POD, body)
    async with KubeClient() as kube:
        with pytest.raises(KubeError, match="get pods rl/a: the answer is no"):
            await kube.get("pods", "rl", "a")


async def test_refused_credentials_are_read_again_once(api: Loopback, tmp_path: Path) -> None:
    tokens: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        tokens.append(request.headers["Authorization"])
        if tokens[-1] != "Bearer two":
            kubeconfig(tmp_path, api.url, token="two")
            return web.json_response({"reason": "Unauthorized"}, status=401)
        return web.json_response({"kind": "Pod"})

    api.answers["GET", POD] = answer
    async with KubeClient() as kube:
        assert await kube.get("pods", "rl", "a") == {"kind": "Pod"}
    assert tokens == ["Bearer one", "Bearer two"]


async def test_credentials_that_stay_refused_are_an_error(api: Loopback) -> None:
    api.answer("GET", POD, {"reason": "Unauthorized"}, 401)
    async with KubeClient() as kube:
        with pytest.raises(Unauthorized):
            await kube.get("pods", "rl", "a")
    assert len(api.requests) == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "the kubeconfig can't be used"),
        ("{a: [", "the kubeconfig can't be used"),
        ("current-context: none", "the kubeconfig can't be used"),
    ],
)
async def test_a_kubeconfig_that_is_no_use_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, sentence: str
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(LoginFailed, match=sentence):
        await load_connection_info()
    async with KubeClient() as kube:
        with pytest.raises(Unauthorized, match="get pods rl/a"):
            await kube.get("pods", "rl", "a")


async def test_paths_beside_the_kubeconfig_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kubeconfig(tmp_path, "https://127.0.0.1:1")
    text = path.read_text().replace('"server"', '"certificate-authority": "ca.crt", "server"')
    path.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(path))
    info = await load_connection_info()
    assert info.ca_path == str(tmp_path / "ca.crt")
