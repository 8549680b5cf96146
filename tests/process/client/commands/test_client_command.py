"""`rollout` at the edges of its world: who reads its output, and an API server that does not answer."""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_client.cluster_client import ClusterClient, load_access
from rollout_client.commands import status_verb
from rollout_client.commands.collect_verb import write_archive
from rollout_client.commands.pool_access import PoolAccess
from rollout_client.commands.rollout_command import run_command
from tests.support.loopback import Loopback, kubeconfig, loopback
from tests.support.waiting import until

POOL = "/apis/rollout.dev/v1alpha1/namespaces/default/rolloutreplicas/policy"
PODS = "/api/v1/namespaces/default/pods"
COMMAND = (sys.executable, "-m", "rollout_client.commands.rollout_command")


def described(message: str = "so it is") -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "observedGeneration": 1}
    return {
        "metadata": {"name": "policy", "namespace": "default", "generation": 1, "resourceVersion": "1"},
        "spec": {"replicas": 1},
        "status": {"phase": "Ready", "message": message, "conditions": [ready]},
    }  # fmt: skip


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Loopback]:
    async with loopback() as server:
        kubeconfig(tmp_path, server.url)
        server.answer("GET", POOL, described())
        server.answer("GET", PODS, {"items": []})
        yield server


async def run_shell(folder: Path, script: str) -> tuple[int, str]:
    """Run a line of shell, in which `$rollout` is the command; return its status, and what came out."""
    script = script.replace("$rollout", f"KUBECONFIG={folder}/kubeconfig {' '.join(COMMAND)}")
    shell = await asyncio.create_subprocess_exec(
        "bash", "-c", script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    async with asyncio.timeout(60):
        said, _ = await shell.communicate()
    return shell.returncode or 0, said.decode()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("$rollout status policy | sleep 0; exit ${PIPESTATUS[0]}", (141, "")),
        ("$rollout status policy >&-", (0, "")),
        ("$rollout wait policy 2>&-", (0, "")),
        ("$rollout status none >&- 2>&-", (1, "")),
    ],
)
async def test_nobody_has_to_read_the_output(
    api: Loopback, tmp_path: Path, script: str, expected: tuple[int, str]
) -> None:
    """As after `| head`, or in a daemon without stdout: no error of Python, and the true exit status."""
    assert await run_shell(tmp_path, script) == expected


async def test_what_up_can_not_use_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, said = await run_shell(tmp_path, f"$rollout up --model m --folder {tmp_path}/file")
    assert (status, said) == (1, f"rollout up: [Errno 17] File exists: '{tmp_path}/file'\n")
    # As where only the client is installed: the tests' own environment has neither.
    status, said = await run_shell(tmp_path, "$rollout up --model m --engine sglang")
    assert status == 1
    assert (
        f"sglang is not installed in {sys.prefix}: run pip install '.[sglang]' in a checkout of Rollout"
        in said
    )


async def test_a_server_that_does_not_answer_does_not_outlast_the_deadline(
    api: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As test_no_verb_waits_beyond_its_deadline_for_an_api_server_without_answers has it of what steers."""
    api.delay("GET", POOL, {}, 60)
    words = ("wait", "policy", "--timeout", "0.5", "--kubeconfig", str(tmp_path / "kubeconfig"))
    began = time.monotonic()
    assert await asyncio.to_thread(run_command, "rollout", words) == 1
    assert time.monotonic() - began < 5
    assert "answer" in capsys.readouterr().err


def test_an_archive_is_whole_or_absent(tmp_path: Path) -> None:
    class FullDisk(str):
        def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_archive(tmp_path / "part.tar.gz", {"a": "b", "c": FullDisk()})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("named", ["--kubeconfig", "--context", "KUBECONFIG"])
async def test_in_a_pod_the_cluster_that_is_named_is_asked(
    api: Loopback,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    named: str,
) -> None:
    """Not that of the pod, which may have a pool of the same name."""
    (tmp_path / "token").write_text("of the pod")
    monkeypatch.setattr("rollout_common.kube.access.SERVICE_ACCOUNT_DIR", tmp_path)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".kube").mkdir()
    config = (tmp_path / "kubeconfig").rename(tmp_path / ".kube" / "config")
    options = {"--kubeconfig": ("--kubeconfig", str(config)), "--context": ("--context", "c")}
    if named == "KUBECONFIG":
        monkeypatch.setenv(named, str(config))
    path = "/api/v1/namespaces/default/services/policy:8000/proxy/v1/completions"
    api.answer("POST", path, {"choices": [{"text": "hello"}]})
    words = ("generate", "policy", "hi", *options.get(named, ()))
    assert await asyncio.to_thread(run_command, "rollout", words) == 0
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.parametrize("output", ["text", "json"])
async def test_a_watch_survives_the_api_server_and_shows_only_changes(
    api: Loopback,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output: str,
) -> None:
    monkeypatch.setattr(status_verb, "POLL_SECONDS", 0.01)
    steps = [described("one"), described("one"), None, None, described("two")]

    async def reply(request: web.Request) -> web.StreamResponse:
        found = steps.pop(0) if len(steps) > 1 else steps[0]
        refusal = {"reason": "InternalError", "message": "the leader changed"}
        return web.json_response(found or refusal, status=200 if found else 500)

    api.answers["GET", POOL] = reply
    given = argparse.Namespace(watch=True, output=output)
    async with ClusterClient(load_access(tmp_path / "kubeconfig")) as kube:
        watch = asyncio.create_task(
            status_verb.run_status(given, PoolAccess(kube, "default", "policy"))
        )
        await until(lambda: len(steps) == 1 and len(api.requests) > 16, 10, what="all steps")
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
    shown = capsys.readouterr()
    assert shown.err == "the API server: the leader changed\n"
    assert [shown.out.count(word) for word in ("one", "two")] == [1, 1]
    if output == "json":
        assert json.loads(shown.out[: shown.out.index("}\n{") + 1])["message"] == "one"
