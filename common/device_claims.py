"""Devices as Kubernetes' claims name them: their names, their order, the claims of a pod.

Pure. Operator and trainer both derive names from the API server's objects, and must get the same ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

Obj = Mapping[str, Any]


def device_lock_name(driver: str, pool: str, device: str) -> str:
    """Return the name of a device's lock, by its allocation; it is the same in every claim."""
    return f"{driver}/{pool}/{device}"


def device_uuids(piece: Obj) -> dict[str, str]:
    """Return the uuids that a driver publishes in a ResourceSlice, by the devices' names.

    A device without the attribute `uuid` is left out.
    """
    spec = piece["spec"]
    driver, pool = spec["driver"], spec["pool"]["name"]
    found: dict[str, str] = {}
    for device in spec.get("devices") or ():
        attributes = device.get("attributes") or {}
        attribute = attributes.get("uuid") or attributes.get(f"{driver}/uuid") or {}
        if attribute.get("string"):
            found[device_lock_name(driver, pool, device["name"])] = attribute["string"]
    return found


def pod_claims(pod: Obj) -> tuple[list[str], list[str]]:
    """Return the names of a pod's ResourceClaims, and of its entries whose claim does not exist yet.

    A pod has claims by name, from a template, and for an extended resource of its limits; the last one
    is created when the pod is scheduled.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    made = {
        e["name"]: e.get("resourceClaimName") for e in status.get("resourceClaimStatuses") or ()
    }
    claims: list[str] = []
    unmade: list[str] = []
    for entry in spec.get("resourceClaims") or ():
        name = entry.get("resourceClaimName") or made.get(entry["name"])
        if name:
            claims.append(name)
        elif entry["name"] not in made:  # else no claim was needed
            unmade.append(entry["name"])
    extended = (status.get("extendedResourceClaimStatus") or {}).get("resourceClaimName")
    claims += [extended] if extended else []
    return [*dict.fromkeys(claims)], unmade


@lru_cache(maxsize=4096)
def natural_sort_key(name: str) -> tuple[tuple[int, str | int], ...]:
    """Sort key of names: their numbers count by value, so gpu-9 comes before gpu-10."""
    parts = re.split(r"(\d+)", name)
    return tuple((1, int(part)) if part.isdigit() else (0, part) for part in parts if part)
