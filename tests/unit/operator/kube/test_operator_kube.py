"""What the client makes of an API server that is away, odd, busy or has new credentials."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from multidict import CIMultiDict

from rollout_common.kube.access import load_access
from rollout_common.kube.api_client import ApiClient, ApiRequest
from rollout_common.kube.errors import (
    AlreadyExists,
    Conflict,
    FencedError,
    Forbidden,
    Gone,
    Invalid,
    KubeError,
    LoginFailed,
    NotFound,
    Unauthorized,
    Unavailable,
    from_answer,
)
from rollout_common.kube.httpx_connections import HttpxConnections
from rollout_operator.kube import kube_client
from rollout_operator.kube.aiohttp_connections import AiohttpConnections
from rollout_operator.kube.credentials import load_kopf_login
from rollout_operator.kube.kube_client import KubeClient
from tests.support.loopback import Loopback, kubeconfig

POD = "/api/v1/namespaces/rl/pods/a"


def each_client(path: Path) -> tuple[ApiClient, ApiClient]:
    """Return a client over aiohttp, as the operator has it, and one over httpx, as the trainer has it."""
    load = partial(load_access, path)
    return ApiClient(load, AiohttpConnections), ApiClient(load, HttpxConnections)


VERSION = ApiRequest("get", "version", "/version", "get the version")


def change_config(path: Path, change: Callable[[Any], object]) -> Path:
    """Change a kubeconfig's document in place."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


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


async def test_a_dead_server_is_unavailable(tmp_path: Path) -> None:
    for client in each_client(kubeconfig(tmp_path, "http://127.0.0.1:1")):
        async with client:
            with pytest.raises(Unavailable, match=r"get the version: .*127"):
                await client.send_request(VERSION)


async def test_what_was_not_sent_is_not_counted(api: Loopback) -> None:
    counted: list[tuple[str, str, int]] = []
    body = {"metadata": {"namespace": "rl", "name": "a"}}
    async with KubeClient(on_request=lambda *request: counted.append(request)) as kube:
        kube.fence_with(lambda: 0.0)
        with pytest.raises(FencedError):
            await kube.create("pods", body)
    assert (counted, api.requests) == ([], [])


async def test_a_write_that_hangs_ends_before_the_lease_does(api: Loopback) -> None:
    api.delay("POST", "/api/v1/namespaces/rl/pods", {}, 30)
    async with KubeClient() as kube:
        kube.fence_with(lambda: 0.2)
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
    "content", ["", "{a: [", "none", "current-context: none", "{current-context: c, contexts: [c]}"]
)
async def test_a_kubeconfig_that_is_no_use_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(LoginFailed, match=f"the kubeconfig {path} can't be used"):
        await load_kopf_login()
    async with KubeClient() as kube:
        with pytest.raises(Unauthorized, match=f"get pods rl/a: the kubeconfig {path}"):
            await kube.get("pods", "rl", "a")


async def test_a_kubeconfig_that_is_corrected_is_read_again(api: Loopback, tmp_path: Path) -> None:
    api.answer("GET", POD, {"kind": "Pod"})
    (tmp_path / "kubeconfig").write_text("")
    async with KubeClient() as kube:
        with pytest.raises(LoginFailed):
            await kube.get("pods", "rl", "a")
        kubeconfig(tmp_path, api.url)
        assert await kube.get("pods", "rl", "a") == {"kind": "Pod"}


def certificate(folder: Path, *signer: str | Path, name: str = "IP:127.0.0.1") -> None:
    """Write a certificate, and its key; without a signer it is its own authority."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "1"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-subj", "/CN=localhost", "-addext", f"subjectAltName={name}"),
            *("-keyout", folder / "key.pem", "-out", folder / "ca.pem", *signer),
        ],
        check=True,
        capture_output=True,
    )


@asynccontextmanager
async def https(folder: Path) -> AsyncIterator[str]:
    """Yield the URL of a server that has the certificate, and answers with the authorization."""

    async def reply(request: web.Request) -> web.StreamResponse:
        return web.json_response({"said": request.headers.get("Authorization")})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", reply)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(folder / "ca.pem", folder / "key.pem")
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_new_authority_is_read_after_a_certificate_was_refused(tmp_path: Path) -> None:
    """Its path is relative to the kubeconfig; the user has a password."""
    (tmp_path / "other").mkdir()
    certificate(tmp_path)
    certificate(tmp_path / "other")
    async with https(tmp_path) as url:
        path = kubeconfig(tmp_path, url)
        document = json.loads(path.read_text())
        document["clusters"][0]["cluster"]["certificate-authority"] = "used.pem"
        document["users"][0]["user"] = {"username": "u", "password": "p"}
        path.write_text(json.dumps(document))
        for client in each_client(path):
            shutil.copy(tmp_path / "other" / "ca.pem", tmp_path / "used.pem")
            async with client:
                with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
                    await client.send_request(VERSION)
                shutil.copy(tmp_path / "ca.pem", tmp_path / "used.pem")
                assert await client.send_request(VERSION) == {"said": "Basic dTpw"}


async def test_a_proxy_is_asked(api: Loopback, tmp_path: Path) -> None:
    proxy = {"proxy-url": api.url}
    path = kubeconfig(tmp_path, "http://kube.invalid")
    change_config(path, lambda given: given["clusters"][0]["cluster"].update(proxy))
    api.answer("GET", POD, {"kind": "Pod"})
    async with KubeClient() as kube:
        assert await kube.get("pods", "rl", "a") == {"kind": "Pod"}
    assert api.headers[0]["Host"] == "kube.invalid"


def test_several_kubeconfigs_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with paths of its own; the first of two entries counts, and a file may be absent."""
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    path = change_config(kubeconfig(first, "http://first"), lambda given: given.pop("users"))
    token = {"user": {"tokenFile": "token"}}
    other = kubeconfig(second, "http://second")
    change_config(other, lambda given: given["users"][0].update(token))
    (second / "token").write_text("of b")
    monkeypatch.setenv("KUBECONFIG", f"{path}:{tmp_path / 'none'}:{other}")
    found = load_access()
    assert (found.server, found.token()) == ("http://first", "of b")


async def test_the_servers_certificate_may_have_another_name(tmp_path: Path) -> None:
    """That of `tls-server-name`, as for a server behind a tunnel."""
    certificate(tmp_path, name="DNS:kubernetes")
    async with https(tmp_path) as url:
        cluster = {"certificate-authority": "ca.pem", "tls-server-name": "kubernetes"}
        path = kubeconfig(tmp_path, url)
        change_config(path, lambda given: given["clusters"][0]["cluster"].update(cluster))
        for client in each_client(path):
            async with client:
                assert await client.send_request(VERSION) == {"said": "Bearer one"}
        wrong = {"tls-server-name": "other"}
        change_config(path, lambda given: given["clusters"][0]["cluster"].update(wrong))
        for client in each_client(path):
            async with client:
                with pytest.raises(Unavailable, match=r"not valid for .*other"):
                    await client.send_request(VERSION)


async def test_an_authority_below_another_one_is_enough(tmp_path: Path) -> None:
    """As for kubectl: a kubeconfig may have the certificate of the server's own authority alone."""
    certificate(tmp_path)
    (tmp_path / "ca.pem").rename(tmp_path / "root.pem")
    (tmp_path / "key.pem").rename(tmp_path / "rootkey.pem")
    signer = ("-CA", tmp_path / "root.pem", "-CAkey", tmp_path / "rootkey.pem")
    certificate(tmp_path, *signer)
    (tmp_path / "ca.pem").rename(tmp_path / "middle.pem")
    (tmp_path / "key.pem").rename(tmp_path / "middlekey.pem")
    certificate(tmp_path, "-CA", tmp_path / "middle.pem", "-CAkey", tmp_path / "middlekey.pem")
    async with https(tmp_path) as url:
        path = kubeconfig(tmp_path, url)
        authority = {"certificate-authority": "middle.pem"}
        change_config(path, lambda given: given["clusters"][0]["cluster"].update(authority))
        for client in each_client(path):
            async with client:
                assert await client.send_request(VERSION) == {"said": "Bearer one"}


async def test_a_user_may_act_as_another_account(api: Loopback, tmp_path: Path) -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        said = {name: request.headers.getall(name) for name in request.headers}
        return web.json_response({k: v for k, v in said.items() if k.startswith("Imp")})

    api.answers["GET", "/version"] = reply
    user = {
        "as": "math", "as-uid": "7", "as-groups": ["train", "read"],
        "as-user-extra": {"scopes.io/a": ["one", "two"]},
    }  # fmt: skip
    path = change_config(
        kubeconfig(tmp_path, api.url), lambda given: given["users"][0]["user"].update(user)
    )
    for client in each_client(path):
        async with client:
            assert await client.send_request(VERSION) == {
                "Impersonate-User": ["math"],
                "Impersonate-Uid": ["7"],
                "Impersonate-Group": ["train", "read"],
                "Impersonate-Extra-scopes.io%2Fa": ["one", "two"],
            }
    kopf_headers = (await load_kopf_login()).as_http_headers()
    assert CIMultiDict(kopf_headers).getall("Impersonate-Group") == ["train", "read"]
    change_config(path, lambda given: given["users"][0]["user"].pop("as"))
    with pytest.raises(LoginFailed, match="also need as"):
        load_access(path)


async def test_kopf_logs_in_as_we_do_and_knows_a_login_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "http://127.0.0.1:1")))
    found = await load_kopf_login()
    assert found.as_http_headers() == {"Authorization": "Bearer one"}
    assert found == await load_kopf_login(), "so that it tries none again that was refused"


async def test_the_official_client_renews_the_token_of_an_auth_provider(
    api: Loopback, tmp_path: Path
) -> None:
    payload = base64.urlsafe_b64encode(json.dumps({"exp": int(time.time()) + 3600}).encode())
    token = f"e30.{payload.decode().rstrip('=')}.c2ln"
    user = {"auth-provider": {"name": "oidc", "config": {"id-token": token}}}
    change_config(kubeconfig(tmp_path, api.url), lambda given: given["users"][0].update(user=user))
    api.answer("GET", POD, {"kind": "Pod"})
    async with KubeClient() as kube:
        assert await kube.get("pods", "rl", "a") == {"kind": "Pod"}
    assert api.headers[0]["Authorization"] == f"Bearer {token}"


TOKENS = "/api/v1/namespaces/rl/serviceaccounts/op/token"


def has_token(api: Loopback, value: str) -> None:
    api.answer("POST", TOKENS, {"status": {"token": value}})


async def test_a_token_that_cant_be_renewed_is_good_until_its_end(
    api: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "TOKEN_RENEW_SHARE", 0.0)  # the first one is due at once
    async with KubeClient(service_account=("rl", "op")) as kube:
        has_token(api, "one")
        assert await kube.get_token("a") == "one"
        api.answer("POST", TOKENS, {"reason": "ServiceUnavailable"}, 503)
        assert [await kube.get_token("a") for _ in range(3)] == ["one"] * 3
        assert len(api.requests) == 2, "who refused is not asked by each poll"
        monkeypatch.setattr(kube_client, "TOKEN_RETRY_SECONDS", 0.0)
        kube.forget_token("a")
        with pytest.raises(Unavailable):
            await kube.get_token("a")
        has_token(api, "two")
        with pytest.raises(Unavailable):
            await kube.get_token("a")
        assert len(api.requests) == 3
        assert await kube.get_token("b") == "two", "another audience"


async def test_a_silent_api_server_is_not_taken_for_a_silent_worker(
    api: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "TOKEN_REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(kube_client, "TOKEN_REFUSED_SECONDS", 0.0)
    api.delay("POST", TOKENS, {}, 5)
    async with KubeClient(service_account=("rl", "op")) as kube:
        with pytest.raises(Unavailable, match=r"the API server gave no token for a within 0\.2 s"):
            await kube.get_token("a")
        has_token(api, "one")
        assert await kube.get_token("a") == "one"
