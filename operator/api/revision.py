"""The revision of a pod: a versioned hash of the fields of spec that need a new pod when changed.

Only what the user wrote is hashed, never a default of the operator or its chart: an upgrade of
the operator must replace no pod. The scheme (`v1`) stands before the hash: a later one must compare the pods of
this one by this one, so that it replaces no pod either.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from typing import Any

from .spec import RolloutReplicaSpec


def _hashed_fields_v1(spec: RolloutReplicaSpec) -> dict[str, Any]:
    """Fields that shape the pod. Not here: replicas, state, weights' target, drainSeconds."""
    body = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    picked: dict[str, Any] = {
        name: body[name]
        for name in (
            "engine",
            "model",
            "parallelism",
            "accelerator",
            "resources",
            "serviceAccountName",
            "podTemplate",
            "scheduling",
            "worker",
        )
        if name in body
    }
    spill = body.get("sleep", {}).get("spill")
    if spill:
        picked["sleep"] = {"spill": spill}
    weights = body.get("weights", {})
    fields = ("volume", "stagingMemory", "transport")
    kept = {name: weights[name] for name in fields if name in weights}
    if kept:
        picked["weights"] = kept
    return picked


_revisions: dict[int, tuple[weakref.ref[RolloutReplicaSpec], str]] = {}
"""By the spec's id, as long as the spec is there. A pass asks for every pod, and specs can't be hashed."""


def pod_revision(spec: RolloutReplicaSpec) -> str:
    """Return `v1-<ten hex digits>`; valid as a label."""
    key = id(spec)
    found = _revisions.get(key)
    if found is not None and found[0]() is spec:
        return found[1]
    text = json.dumps(_hashed_fields_v1(spec), sort_keys=True, separators=(",", ":"))
    made = f"v1-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    _revisions[key] = (weakref.ref(spec, lambda gone: _forget_revision(key, gone)), made)
    return made


def _forget_revision(key: int, gone: weakref.ref[RolloutReplicaSpec]) -> None:
    """Forget a spec that is gone, unless another one has got its id and place already."""
    if key in _revisions and _revisions[key][0] is gone:
        del _revisions[key]


def is_current_revision(found: str, spec: RolloutReplicaSpec) -> bool:
    """Tell whether a pod of revision `found` is what `spec` asks for."""
    return found == pod_revision(spec)
