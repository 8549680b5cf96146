"""The revision of a pod: a versioned hash of the fields of spec that need a new pod when changed.

Only what the user wrote is hashed, never a default of the operator or its chart: an upgrade of
the operator must replace no pod. A pod keeps the scheme (`v1`) that made its hash, and is compared
by that scheme, so that a later scheme replaces no pod either.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
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


REVISION_SCHEMES: dict[str, Callable[[RolloutReplicaSpec], dict[str, Any]]] = {
    "v1": _hashed_fields_v1
}
CURRENT_SCHEME = "v1"

_MAX_CACHED_REVISIONS = 4096
_revision_cache: OrderedDict[tuple[int, str], tuple[RolloutReplicaSpec, str]] = OrderedDict()
"""By the spec's id and the scheme. A pass asks for every pod and specs can't be hashed; the cache
keeps the spec, too, so that no other one can get its id."""


def pod_revision(spec: RolloutReplicaSpec, scheme: str = CURRENT_SCHEME) -> str:
    """Return `<scheme>-<ten hex digits>`; valid as a label."""
    found = _revision_cache.get((id(spec), scheme))
    if found is not None:
        return found[1]
    text = json.dumps(REVISION_SCHEMES[scheme](spec), sort_keys=True, separators=(",", ":"))
    made = f"{scheme}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    _revision_cache[id(spec), scheme] = (spec, made)
    if len(_revision_cache) > _MAX_CACHED_REVISIONS:
        _revision_cache.popitem(last=False)
    return made


def is_current_revision(found: str, spec: RolloutReplicaSpec) -> bool:
    """Tell whether a pod of revision `found` is what `spec` asks for."""
    scheme = found.partition("-")[0]
    return scheme in REVISION_SCHEMES and found == pod_revision(spec, scheme)
