"""RolloutReplica manifests for tests: a small valid one and changes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Document = dict[str, Any]


def pool(name: str = "demo", patch: Mapping[str, Any] | None = None) -> Document:
    """Return a valid pool with `patch` merged into its spec (None removes a field)."""
    spec: Document = {
        "engine": {"type": "hf"},
        "model": {"source": {"path": "/models/tiny"}},
    }
    return {
        "apiVersion": "rollout.dev/v1alpha1",
        "kind": "RolloutReplica",
        "metadata": {"name": name},
        "spec": merged(spec, patch or {}),
    }


def merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> Document:
    """Return the JSON merge patch (RFC 7386) of `base` by `patch`."""
    out = dict(base)
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(out.get(key), Mapping):
            out[key] = merged(out[key], value)
        else:
            out[key] = value
    return out


def text(document: Mapping[str, Any]) -> str:
    """Return the document as kubectl reads it."""
    return json.dumps(document)


GPU = {"resource": "nvidia.com/gpu"}


def target(epoch: int, version: int, path: str | None = "a") -> Document:
    """Return a change of spec that sets the target; no path: the checkpoint."""
    where: Document = {"checkpoint": {}} if path is None else {"path": path}
    return {"weights": {"target": {"epoch": epoch, "version": version, "source": where}}}


def source(**fields: Any) -> Document:
    """Return a change of spec that sets another model source."""
    return {"model": {"source": {"path": None, **fields}}}
