"""Tokens from the program that a kubeconfig names."""

from __future__ import annotations

import json
import ssl
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_client import ClusterError
from rollout_client.kube.cluster_access import load_access
from rollout_client.kube.cluster_client import ClusterClient
from tests.support.loopback import kubeconfig, loopback

API = "client.authentication.k8s.io/v1"
PROGRAM = """#!{python}
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
count = len(list(here.glob("run-*")))
asked = {{"info": json.loads(os.environ["KUBERNETES_EXEC_INFO"]), "args": sys.argv[1:],
         "cloud": os.environ.get("CLOUD")}}
(here / f"run-{{count}}").write_text(json.dumps(asked))
answer = json.loads((here / "answer").read_text())
if "token" in answer.get("status", {{}}):
    answer["status"]["token"] += f"-{{count}}"
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
    path = kubeconfig(folder, url)
    document = json.loads(path.read_text())
    document["users"][0]["user"] = {"exec": {"apiVersion": API, "command": "bin/login", **spec}}
    path.write_text(json.dumps(document))
    return path


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
        ({"kind": "Other"}, "no ExecCredential"),
        ({"status": {"token": "t", "expirationTimestamp": "soon"}}, "no ExecCredential"),
    ],
    ids=str,
)
async def test_what_the_program_says_is_told(
    tmp_path: Path, answer: dict[str, Any], said: str
) -> None:
    """Not only to who asks for the token: to who asks the API server."""
    path = configured(tmp_path)
    answers(tmp_path, **answer)
    kube = ClusterClient(load_access(path))
    with pytest.raises(ClusterError, match=said):
        await kube.get("/version")
    await kube.close()


def test_a_program_that_is_not_there_is_named_with_its_hint(tmp_path: Path) -> None:
    path = configured(tmp_path, installHint="apt install login")
    (tmp_path / "bin" / "login").unlink()
    with pytest.raises(ClusterError, match=r"bin/login: it does not exist: apt install login"):
        load_access(path).token()


async def test_requests_carry_the_token(tmp_path: Path) -> None:
    async with loopback() as server:
        server.answer("GET", "/version", {"major": "1"})
        path = configured(tmp_path, server.url)
        answers(tmp_path, status={"token": "t"})
        kube = ClusterClient(load_access(path))
        assert await kube.get("/version") == {"major": "1"}
        await kube.close()
        assert server.headers[0]["Authorization"] == "Bearer t-0"


async def test_a_token_that_is_refused_is_replaced_at_once(tmp_path: Path) -> None:
    """As for kubectl: it may be withdrawn before its end, and one without an end has none of ours."""
    async with loopback() as server:

        async def version(request: web.Request) -> web.StreamResponse:
            known = request.headers["Authorization"] == "Bearer t-1"
            return web.json_response({"message": "who?"}, status=200 if known else 401)

        server.answers["GET", "/version"] = version
        path = configured(tmp_path, server.url)
        answers(tmp_path, status={"token": "t", "expirationTimestamp": in_seconds(3600)})
        kube = ClusterClient(load_access(path))
        for _ in range(2):
            await kube.get("/version")
        assert len(runs(tmp_path)) == 2
        server.answer("GET", "/version", {"message": "nobody"}, 401)
        with pytest.raises(ClusterError, match="nobody"):
            await kube.get("/version")
        assert len(runs(tmp_path)) == 3, "one more, not for ever"
        await kube.close()


def test_a_certificate_that_is_none_is_told(tmp_path: Path) -> None:
    path = configured(tmp_path)
    pair = {"clientCertificateData": "no certificate", "clientKeyData": "no key"}
    answers(tmp_path, status=pair)
    found = load_access(path)
    for _ in range(2):  # at each request, not only at the first one
        with pytest.raises(ssl.SSLError):
            found.token()
