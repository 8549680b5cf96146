"""Whole operator processes against a real API server: who leads, what a death or an outage does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from localkube import Cluster
from localkube.processes import recorded
from localkube.settings import free_ports
from rollout_operator.kube.settings import (
    RENEW_DEADLINE_SECONDS,
)
from tests.support.api.apiclient import POOLS, api_of
from tests.support.clusters import await_crd
from tests.support.manifests import pool, text
from tests.support.waiting import until_sync

NAMESPACE = "process"
PROGRAM = Path(__file__).parents[1] / "support" / "api" / "tiny_operator.py"


SURVIVORS_LEASE = "survivor"


@pytest.fixture(scope="module")
def cluster(crd: Cluster) -> Iterator[Cluster]:
    crd.kubectl("create", "namespace", NAMESPACE)
    crd.kubectl("-n", NAMESPACE, "create", "-f", "-", input=text(pool("math")))
    yield crd
    crd.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


class Process:
    """One operator process with the tiny pass."""

    def __init__(self, cluster: Cluster, folder: Path, name: str, lease: str, shards: int) -> None:
        self.name = name
        self.folder = folder
        self.log = folder / f"{name}.log"
        flags = {
            "--pod-name": name,
            "--lease-name": lease,
            "--lease-namespace": NAMESPACE,
            "--watch-namespaces": NAMESPACE,
            "--http-host": "127.0.0.1",
            "--http-port": "0",
            "--shards": str(shards),
        }
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    str(PROGRAM),
                    str(folder),
                    *(f"{k}={v}" for k, v in flags.items()),
                ],
                env={**os.environ, **cluster.environment()},
                stdout=log,
                stderr=log,
            )

    def await_port(self) -> None:
        """Wait until it listens."""
        until_sync(lambda: self.port_file.exists() and self.port_file.read_text(), 60, what="port")

    @property
    def port_file(self) -> Path:
        return self.folder / f"{self.name}.port"

    def get(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.port_file.read_text()}{path}"
        answer = httpx.get(url, timeout=5, trust_env=False)
        return answer.status_code, answer.text

    def leads(self) -> bool:
        return "rollout_operator_leader 1.0" in self.get("/metrics")[1]

    def passes(self) -> list[str]:
        path = self.folder / f"{self.name}.passes"
        return path.read_text().splitlines() if path.exists() else []

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def time_of(self, sentence: str) -> float:
        stamp = next(line["time"] for line in self.lines() if line["message"] == sentence)
        return datetime.fromisoformat(stamp).timestamp()

    def end(self, signum: int) -> int:
        self.popen.send_signal(signum)
        return self.popen.wait(25)


Start = Callable[..., Process]


@contextmanager
def starting(cluster: Cluster, folder: Path, lease: str) -> Iterator[Start]:
    """Yield what starts processes for one Lease; all of them are gone at the end."""
    made: list[Process] = []

    def start(name: str, shards: int = 1) -> Process:
        made.append(Process(cluster, folder, name, lease, shards))
        made[-1].await_port()  # one that does not come up is ended, too
        return made[-1]

    yield start
    for process in made:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait(10)


@pytest.fixture
def lease(request: pytest.FixtureRequest) -> str:
    """Name of the test's Lease."""
    return str(request.node.name).replace("_", "-").removeprefix("test-")[:60].strip("-")


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path, lease: str) -> Iterator[Start]:
    with starting(cluster, tmp_path, lease) as found:
        yield found


@pytest.fixture(scope="module")
def survivor(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A process that leads, and goes on whatever happens until the last test of it."""
    with starting(cluster, tmp_path_factory.mktemp("survivor"), SURVIVORS_LEASE) as found:
        process = found("survivor")
        # A standby is ready, too. A pass tells that this one leads and has listed everything.
        until_sync(process.passes, 30, what="the first pass")
        yield process


POOL = f"{POOLS.format(NAMESPACE)}/math"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"


def holder(cluster: Cluster, lease: str) -> str:
    """Who holds a Lease; nobody holds one that is not there."""
    found = [each["spec"] for each in api_of(cluster).items(LEASES, fresh=True)
             if each["metadata"]["name"] == lease]  # fmt: skip
    return str(found[0].get("holderIdentity") or "") if found else ""


def annotate(cluster: Cluster, name: str, value: str | None) -> None:
    api_of(cluster).patch(POOL, {"metadata": {"annotations": {name: value}}})


def wakes(cluster: Cluster, process: Process, value: str, seconds: float = 30) -> None:
    """Change the pool, and see that the process looks at it."""
    before = len(process.passes())
    annotate(cluster, "test/seen", value)
    until_sync(lambda: len(process.passes()) > before, seconds, what="an event to wake the pool")


def message(cluster: Cluster) -> str:
    found: str = api_of(cluster).get(POOL).get("status", {}).get("message", "")
    return found


def test_one_process_serves_a_pool_and_stops_well(
    cluster: Cluster, start: Start, lease: str
) -> None:
    process = start("alone")
    until_sync(lambda: message(cluster) == "0 pods", 10, what="the first pass")
    assert process.get("/healthz") == (200, "ok\n")
    until_sync(lambda: process.get("/readyz") == (200, "ok\n"), 5, what="readiness")
    wakes(cluster, process, "once", 2)
    assert process.end(signal.SIGTERM) == 0
    assert holder(cluster, lease) == ""
    assert all({"time", "level", "logger", "message"} <= set(line) for line in process.lines())
    assert [line for line in process.lines() if line["level"] in ("warning", "error")] == []


def test_a_standby_takes_over_when_the_leader_has_ended_and_not_before(
    cluster: Cluster, start: Start, lease: str
) -> None:
    """Neither when somebody deletes the Lease, nor while the leader finishes its pass."""
    first = start("first")
    until_sync(first.passes, 10, what="the first pass")
    second = start("second")
    assert second.get("/readyz") == (200, "ok\n"), "a standby is ready"
    api_of(cluster).delete(f"{LEASES}/{lease}")
    until_sync(lambda: "first_" in holder(cluster, lease), 5, what="the Lease to be made again")

    count = len(first.passes())
    annotate(cluster, "test/slow", "3")
    until_sync(lambda: len(first.passes()) > count, 5, what="the slow pass")
    first.popen.send_signal(signal.SIGTERM)
    time.sleep(1)
    assert not second.leads(), "the pass still runs"
    assert second.passes() == [], "a standby does nothing"
    annotate(cluster, "test/slow", None)
    assert first.popen.wait(10) == 0
    until_sync(second.leads, 3, what="the second to lead")

    third = start("third")
    assert second.end(signal.SIGTERM) == 0
    until_sync(third.passes, 10, what="the third's first pass")
    took = third.time_of("this operator leads") - second.time_of("stopping")
    assert took < 2, "there was nothing to finish"


def test_shards_divide_the_pools_and_a_standby_takes_any(cluster: Cluster, start: Start) -> None:
    others = [f"shard-{number}" for number in range(8)]
    for name in others:
        api_of(cluster).create(POOLS.format(NAMESPACE), pool(name))
    pools = {f"{NAMESPACE}/{name}" for name in ("math", *others)}

    def seen(process: Process) -> set[str]:
        return {line.split()[0] for line in process.passes()} & pools

    try:
        found = [start(name, shards=2) for name in ("first", "second", "third")]
        until_sync(lambda: sum(each.leads() for each in found) == 2, 20, what="two leaders")
        leaders = [each for each in found if each.leads()]
        until_sync(lambda: set.union(*map(seen, leaders)) == pools, 20, what="all pools")
        assert not set.intersection(*map(seen, leaders))
        [standby] = [each for each in found if not each.leads()]
        assert seen(standby) == set()
        gone = seen(leaders[0])
        assert leaders[0].end(signal.SIGTERM) == 0
        until_sync(standby.leads, 10, what="the standby to lead")
        until_sync(lambda: seen(standby) == gone, 20, what="the pools of the shard")
    finally:
        for name in others:
            api_of(cluster).delete(f"{POOLS.format(NAMESPACE)}/{name}")


def test_an_outage_of_the_api_server_fences_and_passes(cluster: Cluster, survivor: Process) -> None:
    assert survivor.leads()
    assert survivor.get("/readyz")[0] == 200
    server = recorded(cluster.state, "kube-apiserver")
    assert server is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        time.sleep(RENEW_DEADLINE_SECONDS - 4)
        assert survivor.get("/readyz")[0] == 200, "an outage of seconds is no reason"
        until_sync(lambda: survivor.get("/readyz")[0] == 503, 12, what="the fence")
        assert "fenced" in survivor.get("/readyz")[1]
        assert survivor.get("/healthz") == (200, "ok\n"), "a restart would help nobody"
    finally:
        os.kill(server.pid, signal.SIGCONT)
    until_sync(lambda: survivor.get("/readyz")[0] == 200, 20, what="recovery")
    wakes(cluster, survivor, "afterwards")


def test_a_crd_that_goes_and_comes_back_is_served_again(
    cluster: Cluster, survivor: Process
) -> None:
    crd = Path(__file__).parents[2] / "operator" / "crd.yaml"
    cluster.kubectl("delete", "crd", "rolloutreplicas.rollout.dev", timeout=60)
    until_sync(lambda: f"{NAMESPACE}/math 0 False" in survivor.passes(), 10, what="the pool's end")
    time.sleep(3)  # the streams notice and fail
    cluster.kubectl("apply", "--server-side", "-f", crd)
    await_crd(cluster)
    api_of(cluster).create(POOLS.format(NAMESPACE), pool("math"))
    until_sync(lambda: message(cluster) == "0 pods", 60, what="the new pool's first pass")
    wakes(cluster, survivor, "streams")
    assert survivor.popen.poll() is None


def test_a_leader_that_loses_the_lease_exits_at_once(cluster: Cluster, survivor: Process) -> None:
    thief = {"spec": {"holderIdentity": "thief"}}
    api_of(cluster).patch(f"{LEASES}/{SURVIVORS_LEASE}", thief)
    began = time.monotonic()
    assert survivor.popen.wait(10) == 1
    assert time.monotonic() - began < 5
    assert "lost leadership: the Lease is held by 'thief'" in survivor.log.read_text()
    assert holder(cluster, SURVIVORS_LEASE) == "thief"


@pytest.mark.parametrize(
    "target",
    [["-m", "rollout_operator.handlers"], ["operator/handlers.py"]],
    ids=["module", "file"],
)
def test_kopf_run_works_as_well(cluster: Cluster, tmp_path: Path, target: list[str]) -> None:
    (port,) = free_ports(1)
    settings = {
        "LEASE_NAMESPACE": NAMESPACE,
        "LEASE_NAME": f"kopf-{len(target)}",
        "WATCH_NAMESPACES": NAMESPACE,
        "HTTP_HOST": "127.0.0.1",
        "HTTP_PORT": str(port),
    }
    environment = {f"ROLLOUT_OPERATOR_{name}": value for name, value in settings.items()}
    with (tmp_path / "log").open("w") as log:
        popen = subprocess.Popen(
            [sys.executable, "-m", "kopf", "run", *target, "-n", NAMESPACE],
            env={**os.environ, **cluster.environment(), **environment},
            cwd=Path(__file__).parents[2],
            stdout=log,
            stderr=log,
        )
    try:
        until_sync(lambda: answers(f"http://127.0.0.1:{port}/readyz"), 20, what="readiness")
        until_sync(
            lambda: "observedGeneration" in api_of(cluster).get(POOL).get("status", {}),
            10,
            what="the real pass's status",
        )
        lease = f"kopf-{len(target)}"
        until_sync(lambda: holder(cluster, lease), 10, what="the Lease to be held")
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(25) == 0
        assert holder(cluster, lease) == ""
    finally:
        popen.kill()
        popen.wait(10)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_wrong_setting_ends_with_one_sentence() -> None:
    command = [sys.executable, "-m", "rollout_operator", "run", "--config=/none.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("rollout-operator: --config: can't read /none.yaml: ")
    assert done.stderr.count("\n") == 1
