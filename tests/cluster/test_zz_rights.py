"""The rights of the operator and the workers are those that the cluster tests used, no more.

Runs last (by its name): it reads what the API server's audit log has seen of the accounts so far.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from localkube import Cluster


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


@pytest.mark.parametrize("account", ACCOUNTS.values(), ids=ACCOUNTS.keys())
def test_rights_are_exactly_those_used(cluster: Cluster, account: str) -> None:
    rights, done = granted(cluster, account), used(cluster, account)
    assert done - rights == set(), "used without a rule: it was refused"
    assert rights - done - ASKED_ONLY == set(), "granted and never used"
