"""The one home of names: group, labels, ports, conditions, reasons and the names of children."""

from __future__ import annotations

from enum import StrEnum

GROUP = "rollout.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "RolloutReplica"
PLURAL = "rolloutreplicas"
SHORT_NAME = "rr"

MANAGER_NAME = "rollout-operator"
"""Field manager, `managed-by` label and reporting component."""

DATA_PORT = 8000
CONTROL_PORT = 8001
WEIGHTS_PORT = 8002
"""Where workers take pushed weights, unless a pool says otherwise."""
GANG_PORT = 8003
"""Where the engines of a gang's pods find each other."""
CONTROL_TLS_NAME = "rollout-worker"
"""The name for which the certificate of every control port is: pods are called by address."""
CONTROL_TLS_CERT = "ROLLOUT_CONTROL_TLS_CERT_FILE"
"""Variable of a worker whose control port speaks TLS only."""

# Labels and annotations. The value of a label has at most 63 characters.
LABEL_NAME = "app.kubernetes.io/name"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_POOL = f"{GROUP}/pool"
LABEL_REPLICA = f"{GROUP}/replica"
LABEL_RANK = f"{GROUP}/rank"
LABEL_ROLE = f"{GROUP}/role"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_CLASS = f"{GROUP}/operator-class"
"""Of a pod whose pool is of a class: by it the chart's policies and monitors tell two operators' workers apart."""
ROLE_HEAD = "head"
ROLE_MEMBER = "member"
WORKER_APP = "rollout-worker"

LABEL_SERVICE = "kubernetes.io/service-name"
"""Of an EndpointSlice: the Service that it is of."""
LABEL_SLICE_MANAGER = "endpointslice.kubernetes.io/managed-by"
"""Of an EndpointSlice: its manager."""

ANNOTATION_PAUSED = f"{GROUP}/reconcile-paused"
ANNOTATION_RETRY = f"{GROUP}/retry"
ANNOTATION_RESTARTS = f"{GROUP}/restarts"
"""On a pod: how often its replica failed before; this is where the back-off is kept."""
ANNOTATION_SURGE = f"{GROUP}/surge"
"""On a pod: it was made in addition to `spec.replicas`, for the time of a rolling update or of a node's drain."""
ANNOTATION_TRAINER = f"{GROUP}/trainer"
"""On a colocated pod: the trainer's pod next to which it was made; for people."""
ANNOTATION_CLAIM = f"{GROUP}/claim-uid"
"""On a colocated pod: uid of the ResourceClaim that it was made for; another one replaces the pod."""
ANNOTATION_DEVICES = f"{GROUP}/devices"
"""On a colocated pod: names of its share of the claim's devices, comma-separated."""

ANNOTATION_SHARDS = f"{GROUP}/shards"
"""On a Lease of the operator's: the number of shards that its holder divides the pools into."""

ANNOTATION_GATES = f"{GROUP}/gates"
"""On the EndpointSlices of a Hybrid pool: since when each member serves, and which process of it."""

GATE_SERVING = f"{GROUP}/serving"
"""Readiness gate of head pods: the engine is awake and at or above the committed weights."""

CONDITION_PROVEN = f"{GROUP}/proven"
"""Condition of head pods: the worker has once done what its pool asks for, and since when. A replica
that fails long after it counts its failures from zero."""

WORKER_CONTAINER = "worker"
GANG_EXIT_CODE = 3
"""Exit status of a worker that ends because another rank of its gang did."""

MODEL_MOUNT = "/rollout/model"
WEIGHTS_MOUNT = "/rollout/weights"
SPILL_MOUNT = "/rollout/spill"
CACHE_MOUNT = "/rollout/cache"
GANG_MOUNT = "/rollout/gang"
TURN_MOUNT = "/rollout/turn"
"""Folder of the node with the locks of its devices, one file each."""

MAX_NAME_LENGTH = 50
"""Longest name of a RolloutReplica: `<name>-<replica ≤ 9998>-<rank ≤ 998>` stays ≤ 63 and the
Service `<name>-heads` ≤ 63."""


class ConditionType(StrEnum):
    """Types of a RolloutReplica's conditions."""

    READY = "Ready"
    PROGRESSING = "Progressing"
    DEGRADED = "Degraded"
    WEIGHTS_SYNCED = "WeightsSynced"
    ASLEEP = "Asleep"
    SUSPENDED = "Suspended"


def pod_name(pool: str, replica: int, rank: int) -> str:
    """Name (and hostname) of a worker pod; contract, see API.md."""
    return f"{pool}-{replica}-{rank}"


def heads_service(pool: str) -> str:
    """Headless Service of all worker pods, also of those that are not ready."""
    return f"{pool}-heads"


def data_service(pool: str) -> str:
    """Service of the heads that serve."""
    return pool


def token_audience(namespace: str, pool: str) -> str:
    """Audience that a worker of this pool demands of tokens."""
    return f"{GROUP}/{namespace}/{pool}"


def head_selector(pool: str) -> str:
    """Label selector of one pod per replica, for HPA and PDB."""
    return f"{LABEL_POOL}={pool},{LABEL_ROLE}={ROLE_HEAD}"


def pool_labels(pool: str) -> dict[str, str]:
    """Labels of every child of a pool."""
    return {
        LABEL_NAME: WORKER_APP,
        LABEL_MANAGED_BY: MANAGER_NAME,
        LABEL_INSTANCE: pool,
        LABEL_POOL: pool,
    }


def worker_labels(
    pool: str, replica: int, rank: int, operator_class: str | None = None
) -> dict[str, str]:
    """Labels by which a pod of a pool is found; its revision is another matter."""
    of_class = {LABEL_CLASS: operator_class} if operator_class else {}
    return {
        **pool_labels(pool),
        LABEL_REPLICA: str(replica),
        LABEL_RANK: str(rank),
        LABEL_ROLE: ROLE_HEAD if rank == 0 else ROLE_MEMBER,
        **of_class,
    }


def controller_reference(name: str, uid: str) -> dict[str, object]:
    """Owner reference of every child: the garbage collector removes it with its object.

    Without `blockOwnerDeletion`: clusters that enforce it (OpenShift) would demand a right on the
    object's finalizers, and nothing here waits for a foreground deletion.
    """
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
    }
