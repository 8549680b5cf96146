"""The rights of the operator and the workers are those that they use, no more.

The API server's audit log tells what the accounts have done. Last by its name, so that it sees what
the other tests made them do; if those did not run, it makes them do the rest itself.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from localkube import Cluster
from tests.support.cluster.inside import Inside
from tests.support.cluster.pools import Pool


class Right(NamedTuple):
    group: str
    resource: str
    verb: str


ASKED_ONLY = {
    # The workers ask the API server whether the operator may do this; nobody sends it there.
    Right("rollout.dev", "rolloutreplicas/control", "get"),
    Right("rollout.dev", "rolloutreplicas/control", "update"),
    Right("rollout.dev", "rolloutreplicas/weights", "create"),
}
ABSENT_GROUPS = frozenset({"scheduling.volcano.sh", "scheduling.x-k8s.io"})
"""Of gang schedulers, which this cluster does not have: tests/api/test_operator_gangs.py has the operator write their objects."""
CONFLICT = ("True", "NameConflict")
NO_TRAINER = ("True", "TooFewTrainers")
ACCOUNTS = {"operator": "rollout-operator", "worker": "rollout-worker"}


def granted(cluster: Cluster, account: str) -> set[Right]:
    """Rights of every role that is bound to accounts of this name."""
    out: set[Right] = set()
    for kind in ("rolebindings", "clusterrolebindings"):
        text = cluster.kubectl("get", kind, "-A", "-o", "json")
        for binding in json.loads(text)["items"]:
            subjects = binding.get("subjects") or ()
            if not any(s["kind"] == "ServiceAccount" and s["name"] == account for s in subjects):
                continue
            ref = binding["roleRef"]
            words = ["get", ref["kind"].lower(), ref["name"], "-o", "json"]
            if ref["kind"] == "Role":
                words += ["-n", binding["metadata"]["namespace"]]
            for rule in json.loads(cluster.kubectl(*words))["rules"]:
                out |= {
                    Right(group, resource, verb)
                    for group in rule["apiGroups"]
                    for resource in rule["resources"]
                    for verb in rule["verbs"]
                }
    return out


def used(cluster: Cluster, account: str) -> set[Right]:
    """What accounts of this name did, refusals for other reasons than rights included."""
    out = set()
    with cluster.audit_log.open() as lines:
        for line in lines:
            event = json.loads(line)
            user = event["user"]["username"]
            if not user.startswith("system:serviceaccount:") or user.split(":")[-1] != account:
                continue
            what = event.get("objectRef") or {}
            if "resource" not in what:
                continue  # discovery and version
            name = what["resource"]
            if what.get("subresource"):
                name += f"/{what['subresource']}"
            out.add(Right(what.get("apiGroup", ""), name, event["verb"]))
    return out


def unused(cluster: Cluster, account: str) -> set[Right]:
    """Rights that nobody has needed yet."""
    left = granted(cluster, account) - used(cluster, account) - ASKED_ONLY
    return {right for right in left if right.group not in ABSENT_GROUPS}


def tour(cluster: Cluster) -> None:
    """A pool's life with everything in it that needs a right: strangers first, and a mended Service."""
    pool = Pool(cluster, "pools", "tour")
    strangers = [
        {"kind": "Service", "metadata": {"name": "tour"}, "spec": {"ports": [{"port": 1}]}},
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "tour"},
            "spec": {"minAvailable": 0, "selector": {"matchLabels": {"a": "b"}}},
        },
        {
            "kind": "Pod",
            "metadata": {"name": "tour-0-0"},
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "c", "image": "localhost/pause:1"}],
            },
        },
    ]
    items = [{"apiVersion": "v1", **stranger} for stranger in strangers]
    body = {"apiVersion": "v1", "kind": "List", "items": items}
    pool.kubectl("apply", "-f", "-", input=json.dumps(body))
    try:
        pool.apply(drainSeconds=0)
        for stranger in ("service/tour", "poddisruptionbudget/tour", "pod/tour-0-0"):
            pool.eventually("NameConflict", lambda: pool.condition("Degraded") == CONFLICT)
            pool.kubectl("delete", stranger)
        pool.wait("Ready")
        wanted = pool.service()["spec"]["selector"]
        pool.kubectl("patch", "service", "tour", "-p", '{"spec": {"selector": {"a": "b"}}}')
        pool.eventually("it is mended", lambda: pool.service()["spec"]["selector"] == wanted)
        least = ("get", "pdb", "tour", "-o", "jsonpath={.spec.minAvailable}")
        wanted_pods = pool.kubectl(*least)
        pool.kubectl("patch", "pdb", "tour", "--type=merge", "-p", '{"spec": {"minAvailable": 7}}')
        pool.eventually("that is mended", lambda: pool.kubectl(*least) == wanted_pods)
        pool.kubectl("scale", "rr", "tour", "--replicas=0")
        pool.eventually("no pods run", lambda: not pool.pods(), 60)
    finally:
        pool.delete()
    beside = Pool(cluster, "pools", "beside")
    beside.apply(
        mode="Colocated", colocation={"trainerSelector": {"matchLabels": {"a": "b"}}, "slots": 2}
    )
    try:
        beside.eventually("it wants a trainer", lambda: beside.condition("Degraded") == NO_TRAINER)
    finally:
        beside.delete()
    tour_inside(cluster)


def tour_inside(cluster: Cluster) -> None:
    """A Hybrid pool: a stranger has the name of one of its slices, and somebody empties another."""
    pool = Inside(cluster, "pools", "within", "within")
    labels = {"a": "within"}
    strangers = [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": "within-ipv4-0"},
            "addressType": "IPv4",
            "endpoints": [],
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "within-0", "labels": labels},
            "spec": {
                "serviceAccountName": "rollout-worker",
                "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "c", "image": "localhost/pause:1"}],
            },
        },
    ]
    body = {"apiVersion": "v1", "kind": "List", "items": strangers}
    pool.kubectl("apply", "-f", "-", input=json.dumps(body))

    def known() -> bool:
        found = json.loads(pool.kubectl("get", "endpointslice/within-heads-ipv4-0", "-o", "json"))
        return bool(found["endpoints"])

    try:
        pool.make(colocation={"trainerSelector": {"matchLabels": labels}})
        pool.eventually("NameConflict", lambda: pool.condition("Degraded") == CONFLICT)
        pool.kubectl("delete", "endpointslice/within-ipv4-0")
        empty = ("--type=merge", "-p", '{"endpoints": []}')
        pool.kubectl("patch", "endpointslice/within-heads-ipv4-0", *empty)
        pool.eventually("it is mended", known)
    finally:
        pool.kubectl("delete", "pod/within-0")
        pool.delete()


@pytest.fixture(scope="module")
def exercised(cluster: Cluster) -> Cluster:
    """The cluster, after all that the accounts have rights for."""
    if any(unused(cluster, account) for account in ACCOUNTS.values()):
        tour(cluster)
    return cluster


@pytest.mark.parametrize("account", ACCOUNTS.values(), ids=ACCOUNTS.keys())
def test_rights_are_exactly_those_used(exercised: Cluster, account: str) -> None:
    rights, done = granted(exercised, account), used(exercised, account)
    assert done - rights == set(), "used without a rule: it was refused"
    assert unused(exercised, account) == set(), "granted and never used"
