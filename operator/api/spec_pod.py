"""The part of the spec that describes pods: resources, and what is merged into their template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from .names import GROUP, LABEL_INSTANCE, LABEL_MANAGED_BY, LABEL_NAME, WORKER_CONTAINER
from .schema import (
    ATOMIC_LIST,
    ATOMIC_MAP,
    INT32_MAX,
    OPEN_OBJECT,
    SUB_PATH_MEANING,
    ApiModel,
    Dns1123,
    Dns1123Label,
    KeyName,
    Quantity,
    SubPath,
    cel_rule,
    config_with_rules,
    map_list,
    named_list,
    schema_extra,
)

OpenObject = Mapping[str, Any]
ProbeSeconds = Annotated[int, Field(ge=1, le=86400)]


class ProbeTimings(ApiModel):
    """Times of a probe; what it asks is the operator's."""

    initial_delay_seconds: Annotated[int, Field(ge=0, le=86400)] | None = None
    """Time from the container's start to the first probe."""
    period_seconds: ProbeSeconds | None = None
    """Time between two probes."""
    timeout_seconds: ProbeSeconds | None = None
    """How long an answer may take."""
    failure_threshold: Annotated[int, Field(ge=1, le=86400)] | None = None
    """Failures in a row that count."""


class WorkerContainer(ApiModel):
    """The worker's container: what lies over the operator's own settings."""

    security_context: OpenObject | None = Field(default=None, json_schema_extra=OPEN_OBJECT)
    """Security context of the container, as in a pod spec; its fields lie over the operator's (no
    privileges, read-only root)."""
    lifecycle: OpenObject | None = Field(default=None, json_schema_extra=OPEN_OBJECT)
    """Hooks postStart and preStop, as in a pod spec. preStop uses up the grace period,
    spec.drainSeconds + 15 s."""
    startup_probe: ProbeTimings | None = None
    """Until the process answers on /health; every second, 300 failures. Loading the model
    is not included."""
    liveness_probe: ProbeTimings | None = None
    """Of /health; every 10 s, 5 s to answer, 6 failures."""
    readiness_probe: ProbeTimings | None = None
    """Of /ready; every 2 s, 2 s to answer, 2 failures."""


class InitContainer(ApiModel):
    """A container that ends before the worker starts, as in a pod spec (`image`, `command`, …)."""

    model_config = config_with_rules(
        cel_rule(
            f"self.name != '{WORKER_CONTAINER}'",
            f"the container name {WORKER_CONTAINER} is the worker's own: rename this container",
            path=".name",
        ),
        x_kubernetes_preserve_unknown_fields=True,
    ) | {"extra": "allow"}

    name: Dns1123Label
    """Name of the container."""
    restart_policy: Literal["Always"] | None = None
    """Always: the container keeps running with the others, and may start before later entries."""


class Sidecar(InitContainer):
    """A container that runs next to the worker, as in a pod spec (`image`, `command`, …).

    It starts before the worker, is restarted when it ends and ends after the worker.
    """

    restart_policy: Literal["Always"] | None = None
    """Always, whether it is said or not."""


class PodResourceClaim(ApiModel):
    """A ResourceClaim (DRA) of the pod: a claim that exists, or a template that makes one a pod."""

    model_config = config_with_rules(
        cel_rule(
            "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
            "an entry of spec.podTemplate.resourceClaims needs exactly one of resourceClaimName and "
            "resourceClaimTemplateName: keep one",
        )
    )

    name: Dns1123Label
    """Name that spec.resources.claims refers to."""
    resource_claim_name: Dns1123 | None = None
    """A ResourceClaim in the pool's namespace, shared by the pods."""
    resource_claim_template_name: Dns1123 | None = None
    """A ResourceClaimTemplate, of which each pod gets a claim."""


LabelValue = Annotated[
    str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")
]


class Toleration(ApiModel):
    """A taint that the pods tolerate."""

    key: Annotated[str, Field(max_length=316)] | None = None
    """Taint key; if unset, every key (with operator Exists)."""
    operator: Literal["Exists", "Equal"] | None = None
    """How the value is compared; defaults to Equal."""
    value: LabelValue | None = None
    """Taint value, for Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; if unset, every effect."""
    toleration_seconds: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """How long a NoExecute taint is tolerated; if unset, forever."""


class TopologySpreadConstraint(ApiModel):
    """How pods are spread across a topology."""

    max_skew: int = Field(ge=1, le=INT32_MAX)
    """Maximum difference in pod count between domains."""
    topology_key: Annotated[str, Field(min_length=1, max_length=316)]
    """Node label that defines the domains."""
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"]
    """What the scheduler does when it can't meet the skew."""
    label_selector: OpenObject | None = Field(default=None, json_schema_extra=OPEN_OBJECT)
    """Pods that are counted."""
    match_label_keys: tuple[KeyName, ...] = Field(
        default=(), max_length=16, json_schema_extra=ATOMIC_LIST
    )
    """Pod labels whose values must also match."""
    min_domains: int | None = Field(default=None, ge=1, le=INT32_MAX)
    """Minimum number of domains."""
    node_affinity_policy: Literal["Honor", "Ignore"] | None = None
    """Whether node affinity decides which nodes count."""
    node_taints_policy: Literal["Honor", "Ignore"] | None = None
    """Whether taints decide which nodes count."""


OPERATOR_LABELS = (LABEL_NAME, LABEL_INSTANCE, LABEL_MANAGED_BY)
RESERVED_VOLUME_PREFIX = "rollout-"
"""Prefix of the operator's own volumes."""


class ContainerResourceClaim(ApiModel):
    """A ResourceClaim that the worker container uses."""

    name: Dns1123Label
    """Name of an entry in spec.podTemplate.resourceClaims."""
    request: Dns1123Label | None = None
    """One request of that claim; if unset, all of them."""


class ResourceRequirements(ApiModel):
    """Compute resources of the worker container, excluding the accelerator."""

    model_config = config_with_rules(
        cel_rule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits) "
            "|| quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= "
            "0)",
            "spec.resources.requests must not exceed limits: lower the request or raise the limit",
        )
    )

    requests: Mapping[str, Quantity] = Field(default_factory=dict, max_length=32)
    """Amounts that the scheduler reserves."""
    limits: Mapping[str, Quantity] = Field(default_factory=dict, max_length=32)
    """Maximum amounts that the container may use."""
    claims: tuple[ContainerResourceClaim, ...] = Field(
        default=(), max_length=16, json_schema_extra=named_list("spec.resources.claims")
    )
    """ResourceClaims (DRA) whose devices the container uses."""


class Volume(ApiModel):
    """A pod volume: `name` and one source, as in a pod spec (`persistentVolumeClaim`, …)."""

    model_config = config_with_rules(
        cel_rule(
            f"!self.name.startsWith('{RESERVED_VOLUME_PREFIX}')",
            f"volume names starting with {RESERVED_VOLUME_PREFIX} are reserved for the operator: rename it",
            path=".name",
        ),
        x_kubernetes_preserve_unknown_fields=True,
    ) | {"extra": "allow"}

    name: Dns1123Label
    """Name that volumeMounts refer to."""


class VolumeMount(ApiModel):
    """Where a volume is mounted in the worker container."""

    name: Dns1123Label
    """Name of an entry in spec.podTemplate.volumes."""
    mount_path: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        json_schema_extra=schema_extra(
            cel_rule(
                r"self.matches('^(/[^/:]+)+/?$') && !self.matches('(^|/)[.][.]?(/|$)')",
                "mountPath must be an absolute path below / without ':', '.', '..' or '//': "
                "use one like /data",
            ),
            cel_rule(
                "!self.matches('^/rollout(/|$)')",
                "mountPath must not be /rollout or below it: the operator mounts the model and the "
                "weights there; choose another path",
            ),
        )
    )
    """Absolute path; `/rollout` and everything below it is reserved for the operator."""
    sub_path: SubPath | None = Field(default=None, description=SUB_PATH_MEANING)
    read_only: bool | None = None
    """If true, the mount is read-only."""


class ObjectRef(ApiModel):
    """A reference by name in the pool's namespace."""

    name: Dns1123
    """Name of the object."""


LABEL_KEY_PATTERN = (
    r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
)


def label_keys_rule(path: str) -> dict[str, str]:
    """Return the rule that the keys of the mapping at `path` are those of labels."""
    return cel_rule(
        f"self.all(k, k.size() <= 317 && k.matches('{LABEL_KEY_PATTERN}'))",
        f"{path}: a key is a name of at most 63 letters, digits, '-', '_' and '.', "
        "optionally preceded by a DNS prefix and '/': correct the key",
    )


def _reserved_keys_rule(what: str, kind: str, refused: str = "") -> dict[str, str]:
    return cel_rule(
        f"self.all(k, !k.startsWith('{GROUP}/'){refused})",
        f"spec.podTemplate.{what}: {kind} are set by the operator: remove them",
    )


_REFUSED_LABELS = f" && !(k in {list(OPERATOR_LABELS)!r})"


class PodTemplate(ApiModel):
    """Fields merged into the pods that the operator creates; changing them replaces the pods."""

    model_config = config_with_rules(
        cel_rule(
            "!has(self.volumeMounts) || self.volumeMounts.all(m, has(self.volumes) && "
            "self.volumes.exists(v, v.name == m.name))",
            "every entry of volumeMounts needs a volume of the same name: add it to "
            "spec.podTemplate.volumes",
            path=".volumeMounts",
        ),
        cel_rule(
            "!has(self.sidecars) || !has(self.initContainers) || self.sidecars.all(s, "
            "!self.initContainers.exists(i, i.name == s.name))",
            "spec.podTemplate.sidecars and initContainers share their names: rename one container",
            path=".sidecars",
        ),
    )

    labels: Mapping[str, LabelValue] = Field(
        default_factory=dict,
        max_length=32,
        json_schema_extra=schema_extra(
            label_keys_rule("spec.podTemplate.labels"),
            _reserved_keys_rule(
                "labels", f"{GROUP}/* and {', '.join(OPERATOR_LABELS)}", _REFUSED_LABELS
            ),
        ),
    )
    """Additional labels; `rollout.dev/*` and the operator's own are rejected."""
    annotations: Mapping[str, Annotated[str, Field(max_length=4096)]] = Field(
        default_factory=dict,
        max_length=32,
        json_schema_extra=schema_extra(
            label_keys_rule("spec.podTemplate.annotations"),
            _reserved_keys_rule("annotations", f"{GROUP}/*"),
        ),
    )
    """Additional annotations; `rollout.dev/*` is rejected."""
    node_selector: Mapping[str, LabelValue] = Field(
        default_factory=dict,
        max_length=32,
        json_schema_extra=schema_extra(
            label_keys_rule("spec.podTemplate.nodeSelector"), **ATOMIC_MAP
        ),
    )
    """Labels that a node must have."""
    tolerations: tuple[Toleration, ...] = Field(
        default=(), max_length=32, json_schema_extra=ATOMIC_LIST
    )
    """Taints that the pods tolerate."""
    affinity: OpenObject | None = Field(default=None, json_schema_extra=OPEN_OBJECT)
    """Node and pod affinity, as in a pod spec."""
    topology_spread_constraints: tuple[TopologySpreadConstraint, ...] = Field(
        default=(), max_length=16, json_schema_extra=ATOMIC_LIST
    )
    """How the pods are spread."""
    volumes: tuple[Volume, ...] = Field(
        default=(), max_length=32, json_schema_extra=map_list("name")
    )
    """Additional volumes, as in a pod spec; names starting with `rollout-` are reserved."""
    volume_mounts: tuple[VolumeMount, ...] = Field(
        default=(), max_length=32, json_schema_extra=map_list("mountPath")
    )
    """Mounts of these volumes in the worker container."""
    image_pull_secrets: tuple[ObjectRef, ...] = Field(
        default=(), max_length=16, json_schema_extra=ATOMIC_LIST
    )
    """Secrets for pulling the image."""
    priority_class_name: Dns1123 | None = None
    """PriorityClass of the pods."""
    runtime_class_name: Dns1123 | None = None
    """RuntimeClass of the pods."""
    scheduler_name: Dns1123 | None = None
    """Scheduler of the pods; if unset, the cluster's default."""
    security_context: OpenObject | None = Field(default=None, json_schema_extra=OPEN_OBJECT)
    """Security context of the pods, as in a pod spec; if unset, the operator's."""
    init_containers: tuple[InitContainer, ...] = Field(
        default=(), max_length=16, json_schema_extra=named_list("spec.podTemplate.initContainers")
    )
    """Containers that end before the worker starts, as in a pod spec. They may mount the operator's
    volumes: rollout-tmp, rollout-spill, rollout-shm, rollout-gang, rollout-model, rollout-weights,
    rollout-cache."""
    sidecars: tuple[Sidecar, ...] = Field(
        default=(), max_length=16, json_schema_extra=named_list("spec.podTemplate.sidecars")
    )
    """Containers that run next to the worker, as in a pod spec; they end after it."""
    container: WorkerContainer = WorkerContainer()
    """The worker's own container."""
    resource_claims: tuple[PodResourceClaim, ...] = Field(
        default=(), max_length=16, json_schema_extra=named_list("spec.podTemplate.resourceClaims")
    )
    """ResourceClaims (DRA) of the pods; spec.resources.claims says which the worker uses.
    Kubernetes before 1.34 drops them without a word, unless DRA is turned on there."""
    host_network: bool | None = None
    """If true, the pods use the node's network: one pod a node, as ports 8000 to 8002 are the
    node's."""
    host_ipc: bool | None = Field(default=None, alias="hostIPC")
    """If true, the pods use the node's IPC namespace."""
    share_process_namespace: bool | None = None
    """If true, the containers of a pod see each other's processes."""
