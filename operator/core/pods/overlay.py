"""How the user's part of a pod lies over the operator's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollout_operator.api.objects import Obj


def merge_templates(base: Mapping[str, Any], over: Mapping[str, Any]) -> Obj:
    """Overlay the pool's template on the operator's: maps merge, named lists merge by name."""
    out: Obj = dict(base)
    for key, value in over.items():
        if key in ("labels", "annotations", "nodeSelector"):
            out[key] = {**base.get(key, {}), **value}
        elif key in ("volumes", "initContainers", "sidecars", "resourceClaims"):
            out[key] = join_by_key("name", base.get(key, ()), value)
        elif key == "container":
            out[key] = {**base.get(key, {}), **value}
        elif key == "volumeMounts":
            out[key] = join_by_key("mountPath", base.get(key, ()), value)
        elif key == "tolerations":
            out[key] = [*base.get(key, ()), *value]
        else:
            out[key] = value
    return out


def join_by_key(key: str, *parts: Iterable[Obj]) -> list[Obj]:
    """Join lists of entries; a later one replaces an earlier one of the same key in its place."""
    return list({entry[key]: entry for part in parts for entry in part}.values())
