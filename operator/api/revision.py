"""The revision of a pod: a versioned hash of the fields of spec that need a new pod when changed.

Only what the user wrote is hashed, never a default of the operator or its chart: an upgrade of
the operator must replace no pod. The scheme (`v1`) stands before the hash: a later one must compare the pods of
this one by this one, so that it replaces no pod either.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
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


_MAX_CACHED_REVISIONS = 4096
_revision_cache: OrderedDict[int, tuple[RolloutReplicaSpec, str]] = OrderedDict()
"""By the spec's id. A pass asks for every pod and specs can't be hashed; the cache keeps the spec, too, so that no other
one can get its id."""


def pod_revision(spec: RolloutReplicaSpec) -> str:
    """Return `v1-<ten hex digits>`; valid as a label."""
    found = _revision_cache.get(id(spec))
    if found is not None:
        return found[1]
    text = json.dumps(_hashed_fields_v1(spec), sort_keys=True, separators=(",", ":"))
    made = f"v1-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    _revision_cache[id(spec)] = (spec, made)
    if len(_revision_cache) > _MAX_CACHED_REVISIONS:
        _revision_cache.popitem(last=False)
    return made


def is_current_revision(found: str, spec: RolloutReplicaSpec) -> bool:
    """Tell whether a pod of revision `found` is what `spec` asks for."""
    return found == pod_revision(spec)
