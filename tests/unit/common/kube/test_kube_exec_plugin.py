"""Tokens from the program that a kubeconfig names."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_common.kube import exec_plugin
from rollout_common.kube.access import load_access
from rollout_common.kube.api_client import ApiClient, ApiRequest
from rollout_common.kube.errors import LoginFailed, Unauthorized
from rollout_common.kube.httpx_connections import HttpxConnections
from tests.support.loopback import kubeconfig, loopback

VERSION = ApiRequest("get", "version", "/version", "get the version")
API = "client.authentication.k8s.io/v1"
PROGRAM = """#!{python}
import json, os, pathlib, sys, time
here = pathlib.Path(__file__).parent
count = len(list(here.glob("run-*")))
asked = {{"info": json.loads(os.environ["KUBERNETES_EXEC_INFO"]), "args": sys.argv[1:],
         "cloud": os.environ.get("CLOUD")}}
(here / f"run-{{count}}").write_text(json.dumps(asked))
answer = json.loads((here / "answer").read_text())
if "token" in answer.get("status", {{}}):
    answer["status"]["token"] += f"-{{count}}"
time.sleep(answer.get("pause", 0))
sys.stderr.write(answer.get("stderr", ""))
print(json.dumps(answer))
sys.exit(answer.get("exit", 0))
"""


def configured(folder: Path, url: str = "http://127.0.0.1:1", **spec: Any) -> Path:
    """Return a kubeconfig whose user gets tokens from a program beside it."""
    program = folder / "bin" / "login"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    user = {"exec": {"apiVersion": API, "command": "bin/login", **spec}}
    return kubeconfig(folder, url, user=user)


def answers(folder: Path, **answer: Any) -> None:
    (folder / "bin" / "answer").write_text(json.dumps(answer))


def runs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((folder / "bin").glob("run-*"))]


def in_seconds(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_the_program_is_asked_as_kubectl_asks_it(tmp_path: Path) -> None:
    env = [{"name": "CLOUD", "value": "here"}]
    path = configured(tmp_path, args=["get", 7], env=env, provideClusterInfo=True)
    answers(tmp_path, status={"token": "t"})
    found = load_access(path)
    assert runs(tmp_path) == [], "not before there is anything to ask"
    assert found.token() == "t-0"
    info = {
        "apiVersion": API,
        "kind": "ExecCredential",
        "spec": {"interactive": False, "cluster": {"server": "http://127.0.0.1:1"}},
    }
    assert runs(tmp_path) == [{"info": info, "args": ["get", "7"], "cloud": "here"}]


@pytest.mark.parametrize(("seconds", "tokens"), [(3600, ["t-0", "t-0"]), (20, ["t-0", "t-1"])])
def test_a_token_is_used_until_shortly_before_its_end(
    tmp_path: Path, seconds: float, tokens: list[str]
) -> None:
    path = configured(tmp_path)
    answers(tmp_path, status={"token": "t", "expirationTimestamp": in_seconds(seconds)})
    found = load_access(path)
    assert [found.token(), found.token()] == tokens


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"exit": 3, "stderr": "log in first"}, "ended with 3: log in first"),
        ({"status": {}}, "neither a token nor a certificate"),
        ({"kind": "Other"}, "not an ExecCredential"),
        ({"status": {"token": "t", "expirationTimestamp": "soon"}}, "not an ExecCredential"),
    ],
    ids=str,
)
async def test_what_the_program_says_is_told(
    tmp_path: Path, answer: dict[str, Any], said: str
) -> None:
    """Not only to who asks for the token: to who asks the API server."""
    path = configured(tmp_path)
    answers(tmp_path, **answer)
    async with ApiClient(partial(load_access, path), HttpxConnections) as kube:
        with pytest.raises(LoginFailed, match=said):
            await kube.send_request(VERSION)


async def test_a_program_that_fails_runs_once_for_all_who_wait_for_it(tmp_path: Path) -> None:
    """It may take a minute, and open a page each time."""
    path = configured(tmp_path)
    answers(tmp_path, exit=3, stderr="log in first", pause=0.2)
    async with ApiClient(partial(load_access, path), HttpxConnections) as kube:
        sent = [kube.send_request(VERSION) for _ in range(4)]
        said = await asyncio.gather(*sent, return_exceptions=True)
        assert [isinstance(each, LoginFailed) for each in said] == [True] * 4
        assert len(runs(tmp_path)) == 1
        with pytest.raises(LoginFailed):
            await kube.send_request(VERSION)
        assert len(runs(tmp_path)) == 2, "who asks later asks anew"


def test_a_program_that_is_not_there_is_named_with_its_hint(tmp_path: Path) -> None:
    path = configured(tmp_path, installHint="apt install login")
    (tmp_path / "bin" / "login").unlink()
    with pytest.raises(LoginFailed, match=r"bin/login: it does not exist: apt install login"):
        load_access(path).token()


def test_the_last_words_of_a_program_that_waits_for_somebody_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_plugin, "PLUGIN_TIMEOUT_SECONDS", 0.1)
    path = configured(tmp_path)
    (tmp_path / "bin" / "login").write_text("#!/bin/sh\necho open https://login >&2\nexec sleep 9")
    with pytest.raises(LoginFailed, match=r"did not end within 0.1 s: open https://login"):
        load_access(path).token()


async def test_a_token_that_is_refused_is_replaced_at_once(tmp_path: Path) -> None:
    """As for kubectl: it may be withdrawn before its end, and one without an end has none of ours."""
    async with loopback() as server:

        async def version(request: web.Request) -> web.StreamResponse:
            known = request.headers["Authorization"] == "Bearer t-1"
            return web.json_response({"message": "who?"}, status=200 if known else 401)

        server.answers["GET", "/version"] = version
        path = configured(tmp_path, server.url)
        answers(tmp_path, status={"token": "t", "expirationTimestamp": in_seconds(3600)})
        async with ApiClient(partial(load_access, path), HttpxConnections) as kube:
            for _ in range(2):
                await kube.send_request(VERSION)
            assert len(runs(tmp_path)) == 2
            server.answer("GET", "/version", {"message": "nobody"}, 401)
            with pytest.raises(Unauthorized, match="nobody"):
                await kube.send_request(VERSION)
            assert len(runs(tmp_path)) == 3, "one more, not without end"


def test_a_certificate_that_is_none_is_told(tmp_path: Path) -> None:
    path = configured(tmp_path)
    pair = {"clientCertificateData": "no certificate", "clientKeyData": "no key"}
    answers(tmp_path, status=pair)
    found = load_access(path)
    for _ in range(2):  # at each request, not only at the first one
        with pytest.raises(ssl.SSLError):
            found.token()
