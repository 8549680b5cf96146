"""`rollout status`, `why` and the rest, as people type them, against a real API server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from localkube import Cluster
from rollout_client.commands.pool_command import kubectl_main
from tests.support.api.poollab import PoolLab, pool_lab

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(crd: Cluster) -> AsyncIterator[PoolLab]:
    async with pool_lab(crd, "commands") as made:
        yield made


class Typed:
    """What a command answered."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr


def rollout(kubeconfig: Path, *words: str) -> Typed:
    command = [sys.executable, "-m", "rollout_client.commands.rollout_command", *words]
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    return Typed(
        subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
    )


async def test_a_pool_is_shown_explained_slept_and_woken(lab: PoolLab, crd: Cluster) -> None:
    def type_in(*words: str) -> Typed:
        return rollout(crd.kubeconfig, *words, "-n", lab.namespace)

    async def type_while_it_runs(*words: str) -> Typed:
        return await asyncio.to_thread(type_in, *words)

    lab.create("shown", replicas=2)
    await lab.reaches("shown")
    shown = await type_while_it_runs("status")
    assert shown.code == 0, shown.err
    assert "shown (Standalone, hf): Ready, 2 of 2 replicas serve" in shown.out
    assert [line.split()[0] for line in shown.out.splitlines() if line.startswith("    ")] == [
        "shown-0-0",
        "shown-1-0",
    ]
    fine = await type_while_it_runs("why", "shown")
    assert (fine.code, fine.out) == (
        0,
        "shown: nothing is wrong: 2 of 2 replicas serve weights (0, 0)\n",
    )
    asleep = await type_while_it_runs("sleep", "shown", "--timeout", "30")
    assert asleep.code == 0, asleep.err
    told = await type_while_it_runs("why", "shown", "-o", "json")
    found: dict[str, Any] = json.loads(told.out)
    assert told.code == 1
    assert [cause["reason"] for cause in found["causes"]] == ["Ready/Asleep"]
    late = await type_while_it_runs("wait", "shown", "--timeout", "1")
    assert late.code == 1
    assert "shown is not Ready after 1 s" in late.err
    awake = await type_while_it_runs("wake", "shown", "--timeout", "30")
    assert awake.code == 0, awake.err
    there = await type_while_it_runs("wait", "shown", "--for", "weights=0,0")
    assert there.code == 0


async def test_what_can_not_be_read_is_said_in_one_sentence(
    lab: PoolLab, crd: Cluster, tmp_path: Path
) -> None:
    missing = rollout(crd.kubeconfig, "why", "nobody", "-n", lab.namespace)
    assert (missing.code, missing.out) == (1, "")
    assert missing.err == (
        f"error: pool 'nobody' in namespace '{lab.namespace}' does not exist: `kubectl get rr -A` lists all pools\n"
    )
    empty = rollout(crd.kubeconfig, "status", "-n", "default")
    assert empty.err == "error: namespace 'default' has no pools: name another one with -n\n"
    text = crd.kubeconfig.read_text().replace(f":{crd.settings.api_port}", ":1")
    (tmp_path / "dead").write_text(text)
    dead = rollout(tmp_path / "dead", "status", "-n", "default")
    assert dead.code == 1
    assert dead.err.startswith("error: can't read pools in namespace 'default'")
    assert "Traceback" not in dead.err
    none = rollout(tmp_path / "none", "status")
    assert none.code == 1
    assert none.err.startswith("error: ")
    wrong = rollout(crd.kubeconfig, "wait", "math", "--for", "happiness")
    assert wrong.code == 2


async def test_kubectl_runs_it_as_a_plugin(
    lab: PoolLab, crd: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(crd.kubeconfig))
    with pytest.raises(SystemExit) as ended:
        kubectl_main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: kubectl rollout-pool")
    assert "Exit status" in said
