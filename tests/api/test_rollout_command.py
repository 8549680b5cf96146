"""`rollout` against a real API server; the test writes pods, events and status as kubelet and operator would."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from localkube import Cluster
from rollout_client.cluster_client import ClusterClient, load_access
from rollout_client.commands.pool_access import PoolAccess, explain_error
from rollout_client.commands.rollout_command import run_command
from rollout_client.errors import ClusterError
from tests.support.api.apiclient import PODS, POOLS, api_of
from tests.support.manifests import pool as manifest

NAMESPACE = "commands"
POD = "policy-0-0"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def cluster(crd: Cluster) -> Iterator[Cluster]:
    crd.kubectl("create", "namespace", NAMESPACE)
    crd.kubectl("-n", NAMESPACE, "create", "serviceaccount", "nobody")
    api = api_of(crd)
    api.create(POOLS.format(NAMESPACE), manifest("policy"))
    body = {
        "metadata": {
            "name": POD,
            "labels": {"rollout.dev/pool": "policy", "rollout.dev/replica": "0"},
        },
        "spec": {
            "serviceAccountName": "nobody",
            "containers": [
                {"name": "worker", "image": "no/such:1",
                 "env": [{"name": "HF_TOKEN", "value": "s3cr3t"}]}
            ],
        },
    }  # fmt: skip
    api.create(PODS.format(NAMESPACE), body)
    waiting = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
    container = {
        "name": "worker", "image": "", "imageID": "", "ready": False, "restartCount": 0,
        "state": {"waiting": waiting},
    }  # fmt: skip
    api.patch(
        f"{PODS.format(NAMESPACE)}/{POD}/status", {"status": {"containerStatuses": [container]}}
    )
    write_status(crd, "False", "Degraded", "its image can't be pulled")
    yield crd
    crd.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def write_status(cluster: Cluster, ready: str, phase: str, message: str, **more: Any) -> None:
    """Status of the latest spec."""
    api, path = api_of(cluster), f"{POOLS.format(NAMESPACE)}/policy"
    generation = api.get(path)["metadata"]["generation"]
    ready_condition = {
        "type": "Ready", "status": ready, "reason": "Serving" if ready == "True" else "NotServing",
        "message": message, "observedGeneration": generation,
        "lastTransitionTime": "2026-11-26T03:00:00Z",
    }  # fmt: skip
    status = {
        "observedGeneration": generation, "phase": phase, "message": message,
        "conditions": [ready_condition], **more,
    }  # fmt: skip
    api.patch(path + "/status", {"status": status})


@pytest.fixture
def run(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `rollout` as an admin, or with another kubeconfig."""

    def run(*words: str, kubeconfig: Path | None = None) -> tuple[int, str, str]:
        options = ["--kubeconfig", str(kubeconfig or cluster.kubeconfig), "-n", NAMESPACE]
        status = run_command("rollout", [*words, *options])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def test_status_is_a_tree(run: Run) -> None:
    status, out, err = run("status", "policy")
    assert (status, err) == (0, ""), "no progress where there is no terminal"
    assert out.startswith(f"pool {NAMESPACE}/policy  Degraded  0 of ")
    assert f"└─ {POD}  Pending  on no node  not ready" in out
    found = json.loads(run("status", "-o", "json")[1])
    assert [each["name"] for each in found] == ["policy"]
    assert found[0]["replicas"][0]["pods"][0]["name"] == POD


def test_status_needs_no_right_to_read_pods(cluster: Cluster, run: Run) -> None:
    kubectl = partial(cluster.kubectl, "-n", NAMESPACE)
    kubectl("create", "serviceaccount", "reader")
    kubectl("create", "role", "pools", "--verb=get,list", "--resource=rolloutreplicas.rollout.dev")
    kubectl(
        "create", "rolebinding", "pools", "--role=pools", f"--serviceaccount={NAMESPACE}:reader"
    )
    reader = cluster.service_account_kubeconfig(NAMESPACE, "reader")
    for words in (("status", "policy"), ("status",)):
        status, out, err = run(*words, kubeconfig=reader)
        assert (status, err) == (0, "")
        assert out.startswith(f"pool {NAMESPACE}/policy  Degraded")
        assert "not read: pods is forbidden" in out


def test_why_has_cause_evidence_and_fix(run: Run) -> None:
    status, out, err = run("why", "policy", "--progress")
    assert status == 1
    assert "reading commands/policy" in err
    assert "[image-pull]" in out
    assert f"seen: {POD}: container 'worker': ImagePullBackOff: Back-off pulling image" in out
    assert "fix: correct spec.engine.image" in out
    assert f"{POD}: FailedScheduling:" in out.partition("recent warnings:")[2]
    found = json.loads(run("why", "policy", "-o", "json")[1])
    assert found["causes"][0]["cause"] == "image-pull"


def test_wait_is_over_at_the_condition_and_at_the_deadline(cluster: Cluster, run: Run) -> None:
    status, _, err = run("wait", "policy", "--timeout", "1")
    assert (status, "its image can't be pulled; ask rollout why policy" in err) == (1, True)
    weights = {"committed": {"epoch": 1, "version": 7, "source": {"path": "7"}}}
    write_status(cluster, "True", "Ready", "1 of 1 replicas serve", weights=weights)
    assert run("wait", "policy")[0] == 0
    assert run("wait", "policy", "--for", "weights=1/7")[0] == 0
    assert run("wait", "policy", "--for", "weights=8", "--timeout", "1")[0] == 1


def test_verbs_write_the_spec(cluster: Cluster, run: Run) -> None:
    path = f"{POOLS.format(NAMESPACE)}/policy"
    for verb, state in (("sleep", "Asleep"), ("pause", "Paused"), ("wake", "Active")):
        assert run(verb, "policy", "--no-wait")[0] == 0
        assert api_of(cluster).get(path)["spec"]["state"] == state
    status, _, err = run("publish", "policy", "step-8", "--version", "8", "--timeout", "1")
    assert (status, "were not committed within 1 s" in err) == (1, True), (
        "nobody plays the operator"
    )
    moved = json.loads(run("status", "policy", "-o", "json")[1])["targetMoved"]
    assert moved["manager"] == "rollout-client"
    assert 0 <= moved["seconds"] < 60
    target = api_of(cluster).get(path)["spec"]["weights"]["target"]
    assert (target["version"], target["source"]) == (8, {"path": "step-8"})
    status, _, err = run("publish", "policy", "step-9")
    assert (status, "give --take-over" in err) == (1, True)
    assert api_of(cluster).get(path)["spec"]["weights"]["target"] == target


def test_collect_has_everything_but_secrets(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "a.tar.gz"
    assert run("collect", "policy", "--file", str(target))[0] == 0
    assert target.stat().st_mode & 0o777 == 0o600
    with tarfile.open(target) as archive:
        texts = {m.name: archive.extractfile(m).read().decode() for m in archive}  # type: ignore[union-attr]
    assert {"a/pool.json", "a/pods.json", "a/events.json", "a/summary.txt", "a/unread.txt"} <= set(
        texts
    )
    assert POD in texts["a/pods.json"]
    assert "s3cr3t" not in "".join(texts.values())
    status, _, err = run("collect", "policy", "--file", str(target))
    assert (status, "File exists; give another --file" in err) == (1, True)


def test_errors_are_one_sentence_with_the_fix(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    status, _, err = run("status", "nope")
    assert (status, err) == (
        1,
        f"rollout status: namespace {NAMESPACE} has no pool nope: its pools are policy\n",
    )
    nobody = cluster.service_account_kubeconfig(NAMESPACE, "nobody")
    status, _, err = run("why", "policy", kubeconfig=nobody)
    assert (status, "ask for the role rollout-viewer" in err) == (1, True)
    away = yaml.safe_load(cluster.kubeconfig.read_text())
    away["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    (tmp_path / "away").write_text(yaml.safe_dump(away))
    status, _, err = run("status", kubeconfig=tmp_path / "away")
    assert (status, err.startswith("rollout status: the cluster can't be reached: ")) == (1, True)
    assert err.count("\n") == 1


async def test_a_cluster_without_the_crd_is_told(cluster: Cluster) -> None:
    async with ClusterClient(load_access(cluster.kubeconfig)) as kube:
        with pytest.raises(ClusterError) as failed:
            await kube.get("/apis/absent.example/v1/namespaces/x/rolloutreplicas/policy")
        said = await explain_error(failed.value, PoolAccess(kube, NAMESPACE, "policy"))
    assert "helm install rollout-operator" in said
