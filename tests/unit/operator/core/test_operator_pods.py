"""The builders of children: what a pod and the Services of a pool look like."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_operator.api.names import CONTROL_TLS_CERT
from rollout_operator.api.revision import is_current_revision, pod_revision
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.config import EngineDefaults
from rollout_operator.core.placement import PodPlacement
from rollout_operator.core.pods.builder import PodBuilder
from rollout_operator.core.pods.pod_reader import parse_pod
from rollout_operator.core.services import pool_services, service_difference, service_patch
from rollout_operator.core.trainer_pods import RecordedPlacement
from rollout_worker.settings import FLAGS
from tests.support.unit.poolspecs import colocated_spec, spec_of

GPU: dict[str, Any] = {
    "replicas": 1,
    "engine": {"type": "vllm", "args": ["--max-num-seqs=8"]},
    "model": {"source": {"hub": {"repo": "org/model", "revision": "abc"}}},
    "parallelism": {"tensor": 8, "pipeline": 2, "nodes": 2},
    "accelerator": {"resource": "nvidia.com/gpu"},
}


GOLDENS = Path(__file__).parent / "goldens"
EVERYTHING: dict[str, Any] = {
    "operatorClass": "blue",
    "engine": {"type": "hf", "image": "mine:2", "env": [{"name": "B", "value": "2"}], "logprobs": "Raw"},
    "worker": {"startTimeoutSeconds": 60, "maxQueue": 8, "logLevel": "debug"},
    "model": {
        "source": {"claim": {"name": "models", "subPath": "tiny"}},
        "servedName": "policy", "maxLength": 512, "dtype": "float32",
    },
    "weights": {
        "volume": {"claim": {"name": "steps"}}, "stagingMemory": "80Gi",
        "transport": {"port": 9002, "tls": "Required", "egress": "500M", "gangFetch": "All"},
    },
    "drainSeconds": 60,
    "resources": {"limits": {"memory": "1Gi"}},
    "podTemplate": {
        "labels": {"tier": "y"}, "annotations": {"note": "n"}, "nodeSelector": {"disk": "fast"},
        "priorityClassName": "high", "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "mine"}, {"name": "chart"}],
        "volumes": [{"name": "more", "emptyDir": {}}],
        "volumeMounts": [{"name": "more", "mountPath": "/more"}],
    },
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "imagePullPolicy": "Always",
    "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}],
    "podTemplate": {
        "labels": {"team": "a", "tier": "x"}, "nodeSelector": {"zone": "z"},
        "volumes": [{"name": "env", "emptyDir": {}}, {"name": "more", "hostPath": {"path": "/"}}],
        "imagePullSecrets": [{"name": "chart"}],
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "securityContext": {"fsGroup": 7}, "schedulerName": "other",
    },
}  # fmt: skip
PUSHED = {"transport": EVERYTHING["weights"]["transport"]}
TOKEN = {"repo": "org/model", "revision": "abc", "tokenSecret": {"name": "hub", "key": "token"}}


def plain_yaml(*objects: Any) -> str:
    """As YAML without anchors."""
    return yaml.safe_dump_all(json.loads(json.dumps(objects)), sort_keys=False)


def compare(request: pytest.FixtureRequest, name: str, *objects: Any) -> None:
    """Compare objects with a golden, or write it anew."""
    golden, text = GOLDENS / f"{name}.yaml", plain_yaml(*objects)
    if request.config.getoption("--update-goldens"):
        golden.write_text(text)
    assert text == golden.read_text(), "run pytest --update-goldens and review the difference"


@pytest.mark.parametrize(
    ("name", "replica", "rank", "restarts", "defaults", "spec"),
    [
        ("plain", 0, 0, 0, {}, {}),
        ("everything", 2, 0, 3, DEFAULTS, EVERYTHING),
        ("member", 1, 1, 0, {}, {**GPU, "model": {"source": {"hub": TOKEN}}, "weights": PUSHED}),
    ],
    ids=["plain", "everything", "member"],
)
def test_the_whole_pod_is_as_it_was_reviewed(
    request: pytest.FixtureRequest,
    name: str,
    replica: int,
    rank: int,
    restarts: int,
    defaults: dict[str, Any],
    spec: dict[str, Any],
) -> None:
    base = EngineDefaults.model_validate({"image": "worker:1", **defaults})
    wanted = spec_of(**{**spec, "replicas": 3})
    builder = PodBuilder("pool", "ns", "uid", "again" if restarts else "", wanted, base)
    made = builder.build_pod(replica, rank, restarts)
    compare(request, f"pod-{name}", made)
    told = {name for name in env(made) if name.startswith("ROLLOUT_")}
    shape = {"ROLLOUT_TENSOR", "ROLLOUT_PIPELINE", "ROLLOUT_DATA"}  # not of the command line
    assert told - shape <= {flag.variable_name for flag in FLAGS}


PLACE = PodPlacement(
    trainer="t-0",
    node="n1",
    claim="t-0-gpus",
    claim_uid="u",
    request="gpus",
    devices=("gpu.example.com/n1/gpu-2", "gpu.example.com/n1/gpu-3"),
    uuids=("GPU-5d4c", "GPU-0a1b"),
)


def test_a_colocated_pod_is_as_it_was_reviewed(request: pytest.FixtureRequest) -> None:
    more: dict[str, Any] = {
        "podTemplate": {"resourceClaims": [{"name": "nics", "resourceClaimName": "nics"}]},
        "resources": {"claims": [{"name": "nics"}], "limits": {"memory": "1Gi"}},
    }
    spec = colocated_spec(slots=2, tensor=2, **more)
    builder = PodBuilder("pool", "ns", "uid", "", spec, EngineDefaults(image="w:1"), "rollout-turn")
    made = builder.build_pod(1, 0, 0, PLACE)
    compare(request, "pod-colocated", made)
    assert "nodeName" not in made["spec"]


def test_a_pod_is_read_back_with_the_place_it_was_made_for() -> None:
    spec = colocated_spec(slots=2, tensor=2)
    builder = PodBuilder("pool", "ns", "uid", "", spec, EngineDefaults(image="w:1"))
    made = builder.build_pod(1, 0, 0, PLACE)
    made["metadata"]["uid"] = "p"
    pod = parse_pod(made)
    assert pod is not None
    assert pod.colocated
    assert pod.taken == RecordedPlacement("t-0", "u", PLACE.devices)
    del made["metadata"]["annotations"]["rollout.dev/devices"]
    pod = parse_pod(made)
    assert pod is not None
    assert (pod.colocated, pod.taken) == (True, None), "its spec tells, whatever people do"


def test_a_pod_with_all_of_a_claim_chooses_no_devices_and_without_a_directory_takes_no_turn() -> (
    None
):
    builder = PodBuilder(
        "pool", "ns", "uid", "", colocated_spec(tensor=2), EngineDefaults(image="w")
    )
    made = builder.build_pod(0, 0, 0, PLACE)
    told = {entry["name"] for entry in made["spec"]["containers"][0]["env"]}
    assert "ROLLOUT_TENSOR" in told
    assert not told & {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
    assert not any(name.startswith("ROLLOUT_TURN") for name in told)
    assert "rollout-turn" not in plain_yaml(made)


def test_pods_that_must_speak_tls_are_not_made_without_a_certificate() -> None:
    required = spec_of(weights={"transport": {"tls": "Required"}})
    theirs = {"name": CONTROL_TLS_CERT, "value": "/rollout/control-tls/tls.crt"}
    own = {"type": "hf", "env": [theirs]}

    def lacking(spec: RolloutReplicaSpec, env: list[dict[str, str]] | None = None) -> Any:
        base = EngineDefaults.model_validate({"image": "worker:1", "env": env or []})
        return PodBuilder("pool", "ns", "uid", "", spec, base).missing_setting

    what, why = lacking(required)
    assert (what, "workers.controlTLS" in why) == ("certificate", True)
    assert lacking(required, [theirs]) is None
    assert lacking(spec_of(engine=own, weights={"transport": {"tls": "Required"}})) is None
    assert lacking(spec_of()) is None


def test_two_namespaces_of_a_node_have_sockets_of_their_own_in_the_folder_of_the_turn() -> None:
    found = set()
    for namespace in ("ns", "n" * 63):
        builder = PodBuilder(
            "p" * 50, namespace, "uid", "", colocated_spec(tensor=2), EngineDefaults(image="w"), "c"
        )
        found.add(env(builder.build_pod(0, 0, 0, PLACE))["ROLLOUT_WEIGHTS_SOCKET"])
    assert len(found) == 2
    assert all(path.startswith("/rollout/turn/") and len(path) <= 107 for path in found)


def test_each_pod_of_a_colocated_gang_takes_the_turn_of_its_own_node() -> None:
    """And only the head is reached by the node's trainer: a member's worker refuses a socket."""
    spec = colocated_spec(tensor=4, nodes=2)
    builder = PodBuilder("pool", "ns", "uid", "", spec, EngineDefaults(image="w"), "rollout-turn")
    found = []
    for rank in (0, 1):
        devices = tuple(f"gpu.example.com/n{rank}/gpu-{i}" for i in (0, 1))
        place = PodPlacement(f"t-{rank}", f"n{rank}", f"claim-{rank}", f"u{rank}", "gpus", devices)
        made = builder.build_pod(0, rank, 0, place)
        told = env(made)
        assert (told["ROLLOUT_NODES"], told["ROLLOUT_RANK"]) == ("2", str(rank))
        assert told["ROLLOUT_TURN_DIRECTORY"] == "/rollout/turn"
        assert told["ROLLOUT_TURN_DEVICES"] == ",".join(devices)
        assert told["ROLLOUT_TURN_HOLDER"] == f"pool-0-{rank}"
        (claim,) = made["spec"]["resourceClaims"]
        assert claim["resourceClaimName"] == f"claim-{rank}"
        mounts = {m["name"] for m in made["spec"]["containers"][0]["volumeMounts"]}
        assert "rollout-turn" in mounts
        found.append("ROLLOUT_WEIGHTS_SOCKET" in told)
    assert found == [True, False]


def test_both_services_are_as_they_were_reviewed(request: pytest.FixtureRequest) -> None:
    compare(request, "services", *pool_services("pool", "ns", "uid"))
    _, heads = pool_services("pool", "ns", "uid", 9002)
    assert [port["port"] for port in heads["spec"]["ports"]] == [8000, 8001, 9002]


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (("metadata", "labels"), None, "metadata.labels[app.kubernetes.io/name]"),
        (("metadata", "labels", "rollout.dev/pool"), "x", "metadata.labels[rollout.dev/pool]"),
        (("metadata", "labels", "theirs"), "x", None),
        (("spec", "selector"), {"a": "b"}, "spec.selector"),
        (("spec", "publishNotReadyAddresses"), None, "spec.publishNotReadyAddresses"),
        (("spec", "ports"), None, "spec.ports"),
        (("spec", "clusterIPs"), ["None"], None),
    ],
)
def test_what_differs_of_a_service(path: tuple[str, ...], value: object, why: str | None) -> None:
    _, want = pool_services("pool", "ns", "uid")
    have = copy.deepcopy(want)
    for port in have["spec"]["ports"]:
        port["nodePort"] = 30000  # the API server's own additions are no difference
    place = have
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert service_difference(want, have) == why


def test_a_repair_is_a_patch_of_what_is_ours() -> None:
    data, heads = pool_services("pool", "ns", "uid")
    for want, published in ((data, False), (heads, True)):
        changed = {"selector": {"theirs": "x", "rollout.dev/pool": "y"}, "ports": []}
        have = {"metadata": {"resourceVersion": "8"}, "spec": changed}
        patch = service_patch(want, have)
        labels = want["metadata"]["labels"]
        assert patch["metadata"] == {"labels": labels, "resourceVersion": "8"}, "no namesake of it"
        assert patch["spec"] == {
            "selector": {**want["spec"]["selector"], "theirs": None},
            "ports": want["spec"]["ports"],
            "publishNotReadyAddresses": published,
        }
    unselecting, _ = pool_services("pool", "ns", "uid", selecting=False)
    assert service_patch(unselecting, have)["spec"]["selector"] is None


def test_the_template_may_speak_of_lost_nodes_itself() -> None:
    for told in ({"key": "node.kubernetes.io/not-ready"}, {"operator": "Exists"}):
        pod = build(podTemplate={"tolerations": [told]})
        others = [t["key"] for t in pod["spec"]["tolerations"][1:]]
        assert others == (["node.kubernetes.io/unreachable"] if "key" in told else [])


@pytest.mark.parametrize(
    ("model", "mounts", "roots"),
    [
        ("/models/a/b", ["/models"], "/models"),
        ("/models/a/b", ["/models", "/models/a"], "/models/a"),
        ("/modelsother/a", ["/models"], "/modelsother"),
        ("/models", ["/models"], "/models"),
        ("/a", [], "/a"),
    ],
)
def test_weights_may_lie_below_the_models_mount(model: str, mounts: list[str], roots: str) -> None:
    template = {
        "volumes": [{"name": f"v{i}", "emptyDir": {}} for i in range(len(mounts))],
        "volumeMounts": [{"name": f"v{i}", "mountPath": m} for i, m in enumerate(mounts)],
    }
    pod = build(model={"source": {"path": model}}, podTemplate=template)
    assert env(pod)["ROLLOUT_WEIGHTS_ROOTS"] == roots


def build(
    replica: int = 0, rank: int = 0, defaults: dict[str, Any] | None = None, **spec: Any
) -> Any:
    base = EngineDefaults.model_validate({"image": "worker:1", **(defaults or {})})
    return PodBuilder("pool", "ns", "uid", "", spec_of(**spec), base).build_pod(replica, rank, 0)


def env(pod: dict[str, Any]) -> dict[str, Any]:
    return {
        e["name"]: e.get("value", e.get("valueFrom")) for e in pod["spec"]["containers"][0]["env"]
    }


def test_what_engines_compile_lies_in_the_pools_volume_and_models_do_not() -> None:
    engine = {"type": "vllm", "env": [{"name": "TRITON_CACHE_DIR", "value": "/mine"}]}
    claim = {"name": "kernels", "subPath": "h100"}
    pod = build(engine=engine | {"cache": {"claim": claim}})
    [container] = pod["spec"]["containers"]
    source = {"persistentVolumeClaim": {"claimName": "kernels"}}
    assert {"name": "rollout-cache", **source} in pod["spec"]["volumes"], "and is written to"
    mount = {"name": "rollout-cache", "mountPath": "/rollout/cache", "subPath": "h100"}
    assert mount in container["volumeMounts"]
    values = env(pod)
    assert values["VLLM_CACHE_ROOT"] == "/rollout/cache/vllm"
    assert values["XDG_CACHE_HOME"] == values["FLASHINFER_WORKSPACE_BASE"] == "/rollout/cache"
    assert values["TRITON_CACHE_DIR"] == "/mine", "the user's own win"
    assert values["HF_HOME"] == "/tmp/.cache/huggingface"
    plain = build(engine=engine)
    assert not [v for v in plain["spec"]["volumes"] if v["name"] == "rollout-cache"]
    assert not {"XDG_CACHE_HOME", "HF_HOME"} & env(plain).keys()


@pytest.mark.parametrize(
    ("resource", "device"),
    [("nvidia.com/gpu", "cuda"), ("nvidia.com/mig-1g.10gb", "cuda"), ("amd.com/gpu", "cuda"),
     ("example.com/gpu", None), ("notnvidia.com/gpu", None), ("gpu.intel.com/i915", None)],
)  # fmt: skip
def test_who_gets_an_accelerator_never_runs_on_the_cpu_in_silence(
    resource: str, device: str | None
) -> None:
    assert env(build(accelerator={"resource": resource})).get("ROLLOUT_DEVICE") == device
    assert "ROLLOUT_DEVICE" not in env(build())
    builder = PodBuilder("pool", "ns", "uid", "", colocated_spec(), EngineDefaults(image="w"))
    driver = resource.partition("/")[0]
    place = replace(PLACE, devices=(f"{driver}/n1/gpu-2",))
    assert env(builder.build_pod(0, 0, 0, place)).get("ROLLOUT_DEVICE") == device


def test_a_pod_with_one_device_tells_its_engine_so() -> None:
    """Flags of the engine could else ask for more devices than the pod gets."""
    shape = {"ROLLOUT_TENSOR": "1", "ROLLOUT_PIPELINE": "1", "ROLLOUT_DATA": "1"}
    counted = build(engine={"type": "vllm"}, accelerator={"resource": "nvidia.com/gpu"})
    assert env(counted).items() >= shape.items()
    assert not env(build(engine={"type": "vllm"})).keys() & shape.keys(), "a CPU is not counted"


def test_only_what_needs_a_new_pod_is_in_the_revision() -> None:
    same: list[dict[str, Any]] = [
        {"replicas": 9},
        {"state": "Asleep"},
        {"suspend": True},
        {"drainSeconds": 60},
        {"sleep": {"level": 2}},
        {"weights": {"strategy": "Eager"}},
        {"weights": {"transport": {}}},
        {"weights": {"transport": {"port": 8002, "tls": "Off", "gangFetch": "Needed"}}},
        {"updateStrategy": {"maxUnavailable": 3, "maxSurge": 1, "partition": 2}},
        {"disruption": {"maxUnavailable": 0}},
        {"restartPolicy": {"maxRestarts": 3}},
    ]
    other: list[dict[str, Any]] = [
        {"engine": {"type": "hf", "image": "x"}},
        {"engine": {"type": "hf", "cache": {"claim": {"name": "c"}}}},
        {"podTemplate": {"labels": {"a": "b"}}},
        {"podTemplate": {"sidecars": [{"name": "logs", "image": "logs:1"}]}},
        {"worker": {"logLevel": "debug"}},
        {"sleep": {"spill": {"sizeLimit": "40Gi"}}},
        {"resources": {"limits": {"memory": "1Gi"}}},
        {"weights": {"volume": {"claim": {"name": "w"}}}},
        {"weights": {"stagingMemory": "80Gi"}},
        {"weights": {"transport": {"port": 9002}}},
        {"weights": {"transport": {"tls": "Required"}}},
        {"weights": {"transport": {"egress": "500M"}}},
        {"weights": {"transport": {"gangFetch": "All"}}},
    ]
    assert all(is_current_revision(pod_revision(spec_of()), spec_of(**change)) for change in same)
    assert not any(
        is_current_revision(pod_revision(spec_of()), spec_of(**change)) for change in other
    )
    assert not is_current_revision("v0-1234567890", spec_of())


def test_the_head_of_a_gang_has_the_ports_of_both() -> None:
    [container] = build(**GPU)["spec"]["containers"]
    assert [p["name"] for p in container["ports"]] == ["data", "control", "weights", "gang"]
    assert env(build(**GPU))["ROLLOUT_WEIGHTS_PORT"] == "8002"


def test_a_members_probes_speak_tls_where_control_ports_do() -> None:
    tls = {"env": [{"name": CONTROL_TLS_CERT, "value": "/rollout/control-tls/tls.crt"}]}
    for rank, scheme in ((0, None), (1, "HTTPS")):
        [container] = build(rank=rank, defaults=tls, **GPU)["spec"]["containers"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"].get("scheme") == scheme
    assert CONTROL_TLS_CERT in {flag.variable_name for flag in FLAGS}


@pytest.mark.parametrize("port", ["8000", "9400"])
def test_no_scraper_is_sent_to_a_port_that_a_member_does_not_have(port: str) -> None:
    """Such a target would be down for ever; what else runs beside the worker is scraped everywhere."""
    told = {"prometheus.io/scrape": "true", "prometheus.io/port": port}
    defaults = {"podTemplate": {"annotations": {**told, "team": "rl"}}}
    for rank in (0, 1):
        found = build(rank=rank, defaults=defaults, **GPU)["metadata"]["annotations"]
        assert found["team"] == "rl"
        assert (told.items() <= found.items()) == (rank == 0 or port == "9400")


def test_only_a_gang_has_the_token_of_its_head() -> None:
    for rank in (0, 1):
        pod = build(rank=rank, **GPU)
        [volume] = [v for v in pod["spec"]["volumes"] if "projected" in v]
        [source] = volume["projected"]["sources"]
        assert source["serviceAccountToken"]["audience"] == "rollout.dev/ns/pool"
        mounts = {m["name"]: m for m in pod["spec"]["containers"][0]["volumeMounts"]}
        assert mounts[volume["name"]]["readOnly"]
        folder, path = mounts[volume["name"]]["mountPath"], source["serviceAccountToken"]["path"]
        assert env(pod)["ROLLOUT_GANG_TOKEN_FILE"] == f"{folder}/{path}"
        assert env(pod)["ROLLOUT_GANG_PORT"] == "8003"
    alone = build(**{**GPU, "parallelism": {"tensor": 8}})
    assert env(alone)["ROLLOUT_NODES"] == "1"
    assert not {"ROLLOUT_GANG_PORT", "ROLLOUT_GANG_TOKEN_FILE"} & env(alone).keys()
    assert not any("projected" in v for v in alone["spec"]["volumes"])


def test_what_gangs_have_replaces_no_pod_of_other_pools() -> None:
    """The revision is of what the user wrote; these are those of the release before."""
    assert pod_revision(spec_of()) == "v1-fed4b39327"
    assert pod_revision(spec_of(**{**GPU, "parallelism": {"tensor": 8}})) == "v1-2892658b2c"
    assert pod_revision(spec_of(**GPU)) == "v1-851f0472ea"


def test_a_template_may_bring_containers_claims_and_the_nodes_namespaces() -> None:
    defaults: dict[str, Any] = {
        "podTemplate": {
            "initContainers": [
                {"name": "fill", "image": "old:1"},
                {"name": "warm", "image": "w:1"},
            ],
            "container": {"readinessProbe": {"failureThreshold": 9}, "lifecycle": {"preStop": {}}},
            "hostIPC": True,
        }
    }
    template: dict[str, Any] = {
        "initContainers": [{"name": "fill", "image": "new:1"}],
        "sidecars": [{"name": "logs", "image": "logs:1"}],
        "resourceClaims": [{"name": "nics", "resourceClaimTemplateName": "nics"}],
        "hostNetwork": True,
        "hostIPC": False,
        "shareProcessNamespace": True,
        "container": {
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            "livenessProbe": {"failureThreshold": 60},
        },
    }
    pod = build(
        defaults=defaults,
        podTemplate=template,
        resources={"claims": [{"name": "nics", "request": "rdma"}]},
    )["spec"]
    assert pod["initContainers"] == [
        {"name": "fill", "image": "new:1"},
        {"name": "warm", "image": "w:1"},
        {"name": "logs", "image": "logs:1", "restartPolicy": "Always"},
    ]
    assert pod["resourceClaims"] == template["resourceClaims"]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert (pod["hostIPC"], pod["shareProcessNamespace"]) == (False, True)
    [worker] = pod["containers"]
    assert worker["resources"]["claims"] == [{"name": "nics", "request": "rdma"}]
    assert worker["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"add": ["IPC_LOCK"]},
    }
    assert worker["livenessProbe"]["failureThreshold"] == 60
    assert worker["livenessProbe"]["periodSeconds"] == 10
    assert worker["livenessProbe"]["httpGet"] == {"path": "/health", "port": "data"}
    assert worker["lifecycle"] == {"preStop": {}}


@pytest.mark.parametrize(
    ("spill", "volume", "folder"),
    [
        ({}, {}, "/rollout/spill"),
        ({"sizeLimit": "40Gi"}, {"sizeLimit": "40Gi"}, "/rollout/spill"),
        (
            {"medium": "Memory", "sizeLimit": "40Gi"},
            {"medium": "Memory", "sizeLimit": "40Gi"},
            "/rollout/spill",
        ),
        ({"path": "/scratch"}, None, "/scratch"),
    ],
    ids=["nodes-disk", "sized", "memory", "own-folder"],
)
def test_sleep_has_room_of_its_own(
    spill: dict[str, Any], volume: dict[str, Any] | None, folder: str
) -> None:
    pod = build(sleep={"spill": spill})
    assert env(pod)["ROLLOUT_SPILL_DIR"] == folder
    volumes = {v["name"]: v.get("emptyDir") for v in pod["spec"]["volumes"]}
    assert volumes.get("rollout-spill") == volume
    mounts = {m["mountPath"]: m["name"] for m in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounts.get("/rollout/spill") == (None if volume is None else "rollout-spill")


def test_what_the_operator_tells_the_worker_is_what_it_assumes_by_itself() -> None:
    """A field that nobody sets has one default, in the schema as in `rollout-worker serve --help`."""
    told, names = env(build()), ("ROLLOUT_START_TIMEOUT", "ROLLOUT_MAX_QUEUE", "ROLLOUT_LOG_LEVEL")
    shown = {flag.variable_name: flag.shown_default for flag in FLAGS}
    assert {name: told[name] for name in names} == {name: shown[name] for name in names}
