"""From facts to causes, without a cluster; the stories on an API server are in tests/api/test_operator_stories.py."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rollout_client.commands.archive_redaction import REDACTED, redact_object, redact_text
from rollout_client.commands.cause_finding import ORDER, find_causes, runbook_words
from rollout_client.commands.command_output import make_printable
from rollout_client.commands.pool_facts import PoolFacts
from rollout_client.commands.pool_summary import render_summary, summarize_pool
from rollout_client.commands.rollout_command import make_parser, run_command, run_plugin
from rollout_client.commands.steer_verbs import parse_wait
from rollout_common.kube.access import Obj

NOW = datetime(2026, 11, 26, 3, 0, tzinfo=UTC)


def pool(conditions: dict[str, tuple[str, str, str]], **status: Any) -> Obj:
    """A pool whose conditions are (status, reason, message) by type."""
    listed = [
        {"type": k, "status": s, "reason": r, "message": m, "observedGeneration": 1}
        for k, (s, r, m) in conditions.items()
    ]
    return {
        "metadata": {"name": "policy", "namespace": "rl", "generation": 1},
        "spec": {"replicas": 2},
        "status": {"observedGeneration": 1, "conditions": listed, **status},
    }


def degraded(reason: str, message: str) -> Obj:
    return pool({"Ready": ("False", "NotServing", ""), "Degraded": ("True", reason, message)})


READY = pool({"Ready": ("True", "Serving", ""), "Degraded": ("False", "AsExpected", "")})


def causes(facts: PoolFacts) -> list[str]:
    return [each.cause for each in find_causes(facts)]


def lease(age: float) -> Obj:
    renewed = (NOW - timedelta(seconds=age)).isoformat()
    return {"metadata": {"name": "rollout-operator"}, "spec": {"renewTime": renewed}}


def pod(node: str | None = "n1", **status: Any) -> Obj:
    return {
        "metadata": {
            "name": "policy-0-0",
            "labels": {"rollout.dev/replica": "0"},
            "creationTimestamp": "2026-11-26T02:00:00Z",
        },
        "spec": {} if node is None else {"nodeName": node},
        "status": {"phase": "Pending", **status},
    }


@pytest.mark.parametrize(
    ("reason", "message", "cause"),
    [
        ("PodTrouble", "container 'worker' can't get its image: ErrImagePull x", "image-pull"),
        ("EngineFailed", "policy-0-0: '/rollout/model' holds no config.json", "model-path"),
        ("CrashLooping", "last cause: OOMKilled, exit code 137", "out-of-memory"),
        ("WeightsFailed", "'/w/7' does not exist: check path and mounts", "weights-missing"),
        ("Rejected", "pods \"p\" is forbidden: exceeded quota: q", "quota"),
        ("ApiError", 'failed calling webhook "w.example"', "webhook"),
        ("Unreachable", "GET …: no answer within 3 s", "worker-hangs"),
        ("Unreachable", "GET …: no connection within 3 s", "Degraded=True/Unreachable"),
        ("EngineFailed", "one step has been running for 130 s, its deadline is 120 s", "worker-hangs"),
        ("NoLiveCopy", "no replica has a copy", "Degraded=True/NoLiveCopy"),
    ],
)  # fmt: skip
def test_a_message_names_one_cause(reason: str, message: str, cause: str) -> None:
    found = find_causes(PoolFacts(degraded(reason, message), NOW))
    assert [each.cause for each in found] == [cause]
    assert message in found[0].evidence[0]
    assert found[0].fix


def test_a_pod_without_a_node_and_one_without_an_image_name_their_causes() -> None:
    waiting = pool({"Ready": ("False", "NotServing", ""), "Progressing": ("True", "Starting", "s")})
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                   "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."}  # fmt: skip
    image = {"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    pods = [pod(None, conditions=[unscheduled]), pod(containerStatuses=[image])]
    assert causes(PoolFacts(waiting, NOW, pods=pods))[:2] == ["image-pull", "no-node"]
    claim = {**unscheduled, "message": '0/4 nodes: persistentvolumeclaim "m" not found'}
    assert "no-node" not in causes(PoolFacts(waiting, NOW, pods=[pod(None, conditions=[claim])]))
    queued = "policy-0-0: Unschedulable: SchedulingGated: it may wait in queue 'q'"
    gated = pool({"Progressing": ("True", "Unschedulable", queued)})
    assert causes(PoolFacts(gated, NOW)) == ["Progressing=True/Unschedulable"]
    outdated = pod(conditions=[unscheduled])  # its scheduler tried to bind it twice
    assert "no-node" not in causes(PoolFacts(waiting, NOW, pods=[outdated]))


def test_a_lost_node_and_an_old_lease_come_first() -> None:
    silent = {"status": {"conditions": [{"type": "Ready", "status": "Unknown", "message": "m"}]}}
    trouble = degraded("Unreachable", "no answer within 3 s")
    facts = PoolFacts(trouble, NOW, pods=[pod()], nodes={"n1": silent}, leases=[lease(300)])
    assert causes(facts) == ["operator-down", "node-lost", "worker-hangs"]
    assert "operator-down" not in causes(PoolFacts(READY, NOW, leases=[lease(300), lease(3)]))
    assert causes(PoolFacts(READY, NOW, leases=[{"metadata": {"name": "x"}, "spec": {}}])) == [
        "operator-down"
    ]


def test_old_errors_of_a_healthy_pool_are_no_cause() -> None:
    errors = [{"time": NOW.isoformat(), "message": "OOMKilled"}]
    healthy = {**READY, "status": {**READY["status"], "lastErrors": errors}}
    assert causes(PoolFacts(healthy, NOW)) == []
    assert causes(PoolFacts({**READY, "status": {}}, NOW)) == []


def test_every_cause_has_the_runbooks_words() -> None:
    words = runbook_words()
    assert set(ORDER) == set(words["causes"])
    assert all(entry["fix"] for entry in words["causes"].values())
    assert all(entry["meaning"] not in ("", "as above") for entry in words["reasons"].values())


def test_the_tree_has_the_update_and_each_pod() -> None:
    last = {
        "epoch": 1,
        "version": 8,
        "phase": "Staging",
        "startedAt": (NOW - timedelta(seconds=12)).isoformat(),
        "message": "staging",
        "attempts": 2,
    }
    committed = {"epoch": 1, "version": 7}
    members = [{"name": "policy-0-0", "state": "Active", "epoch": 1, "version": 7, "ready": True}]
    found = pool({}, phase="Updating", message="m", members=members,
                 weights={"committed": committed, "lastUpdate": last, "stagedReplicas": 1})  # fmt: skip
    tree = render_summary(summarize_pool(found, [pod()], NOW))
    assert "update (1, 8): Staging for 12s, 1 replicas have staged, attempt 2: staging" in tree
    assert "   └─ policy-0-0  Pending  on n1  is Active  weights (1, 7)  not ready  60m" in tree


def test_the_tree_says_who_set_the_target_and_when() -> None:
    def entry(manager: str, seconds: int, spec: Obj) -> Obj:
        at = (NOW - timedelta(seconds=seconds)).isoformat()
        return {"manager": manager, "time": at, "fieldsV1": {"f:spec": spec}}

    found = pool({})
    found["spec"] = {"weights": {"target": {"epoch": 1, "version": 8}}}
    assert summarize_pool(found, [], NOW)["targetMoved"] is None, (
        "the API server keeps nothing of it"
    )
    target: Obj = {"f:weights": {"f:target": {}}}
    found["metadata"]["managedFields"] = [
        entry("kubectl-patch", 300, target),
        entry("rollout-client", 13, target),
        entry("helm", 5, {"f:replicas": {}, "f:weights": {"f:strategy": {}}}),
        {"manager": "rollout-operator", "subresource": "status", "fieldsV1": {"f:status": {}}},
    ]
    tree = render_summary(summarize_pool(found, [], NOW))
    assert "  target (1, 8): set 13s ago by rollout-client" in tree.splitlines()


def test_members_in_the_trainers_pods_are_shown() -> None:
    members = [{"name": "trainer-0", "node": "n2", "state": "Active", "ready": True}]
    tree = render_summary(summarize_pool(pool({}, members=members), [], NOW))
    assert tree.endswith("└─ other members\n   └─ trainer-0  Member  on n2  is Active  ready")


@pytest.mark.parametrize(
    ("words", "holds"),
    [("ready", True), ("asleep", False), ("weights=7", True), ("weights=8", False),
     ("weights=1/9", True), ("weights=2/8", False)],
)  # fmt: skip
def test_what_wait_waits_for(words: str, holds: bool) -> None:
    committed = {"committed": {"epoch": 2, "version": 7}}
    found = {**READY, "status": {**READY["status"], "weights": committed}}
    assert parse_wait(words)(found) is holds
    found["metadata"] = {**found["metadata"], "generation": 2}
    assert not parse_wait("ready")(found), "that was the last spec"


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer s3cr3tvalue",
        "https://user:s3cr3tvalue@proxy.example/x",
        "HF_TOKEN=s3cr3tvalue start",
        '{"api_key": "s3cr3tvalue"}',
        "--api-key s3cr3tvalue",
        "--api-key=s3cr3tvalue",
        "got eyJhbGciOi.s3cr3tvalue.abc",
        "-----BEGIN RSA PRIVATE KEY-----\ns3cr3tvalue\n",
        "hf_s3cr3tvalue0123",
    ],
)
def test_secrets_in_texts_are_replaced(text: str) -> None:
    cleaned = redact_text(text)
    assert "s3cr3tvalue" not in cleaned
    assert REDACTED in cleaned


def test_secrets_in_objects_are_replaced() -> None:
    container = {
        "env": [
            {"name": "WANDB_API_KEY", "value": "s3cr3t"},
            {"name": "X", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "k"}}},
        ],
        "args": ["--api-key", "s3cr3t", "--password=s3cr3t", "--model", "kept"],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "s3cr3t"},
        "password": "s3cr3t",
    }
    cleaned = json.dumps(redact_object(container))
    assert "s3cr3t" not in cleaned
    assert all(word in cleaned for word in ("kept", "mine", "--model"))


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in make_printable("a\x1b]0;title\x07b")
    # C1 controls, overrides of the direction, separators of lines, and what is not seen.
    odd = "\r\x9b\u202e\u2066\u200e\u2028\u2029\u00ad\u200b\ufeff"
    assert make_printable(odd) == "\N{REPLACEMENT CHARACTER}" * len(odd)


def test_code_and_text_of_any_language_is_printed_as_it_is() -> None:
    family = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}"
    hindi = "\u0915\u094d\u200d\u0937 \u0915\u094d\u200c\u0937"
    for text in ("def f():\n\treturn 1\n", "東京\u3000大阪", "a\u00a0b\u202f!", family, hindi):
        assert make_printable(text) == text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("generate", "p", "text", "--temperature", "nan"), "at least 0, such as 0.7, not 'nan'"),
        (("generate", "p", "text", "--temperature", "-1"), "at least 0"),
        (("generate", "p", "text", "--temperature", "hot"), "at least 0"),
        (("generate", "p", "\udcff"), "argument TEXT: give it as UTF-8"),
        (("generate", "p", "text", "--adapter", "\udcff"), "--adapter: give it as UTF-8"),
        (("publish", "p", "\udcff"), "argument PATH: give it as UTF-8"),
        (("publish", "p", "--version", "9" * 20), "give at most 9007199254740991"),
        (("publish", "p"), "publish: give a PATH, or --version"),
        (("why", "../secrets"), "'../secrets' can't be the name of a Kubernetes object"),
        (("status", "-n", "a/b"), "'a/b' can't be the name of a Kubernetes object"),
        (("generate", "p"), "generate: give a TEXT or --ids, one of both"),
        (("generate", "p", "text", "--ids", "1"), "generate: give a TEXT or --ids, one of both"),
        (("generate", "p", "--ids", "1,x"), "give token ids such as 1,2,3, not '1,x'"),
        (("wait", "p", "--for", "soon"), "give ready, asleep, suspended, weights=VERSION or"),
        (("wait", "p", "--timeout", "0"), "give seconds above 0, such as 90 or 10m, not '0'"),
        (("up", "--model", "m", "--replicas", "two"), "a whole number of at least 1, not 'two'"),
    ],
)
def test_what_is_wrong_with_an_argument_is_said(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command("rollout", words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_plugin_has_all_verbs_but_up(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_plugin(["up"])
    assert "invalid choice: 'up'" in capsys.readouterr().err
    assert "up " in make_parser("rollout").format_help()
    assert "up  " not in make_parser("kubectl rollout-pool").format_help()


def test_no_cluster_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    assert run_command("rollout", ["status"]) == 1
    assert capsys.readouterr().err.startswith("rollout status: the kubeconfig ")
