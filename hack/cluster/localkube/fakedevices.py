"""Fake devices for ResourceClaims: on every node a DRA driver of our own (hack/cluster/fakedevices).

What a claim, the scheduler and the kubelet do with them is real. A device's "memory" is a file that
all containers which have the device share (`/dev/gpu-0`); holding a flock on it stands for holding
memory.
"""

from __future__ import annotations

from pathlib import Path

from . import node_files
from .apiserver import ApiServer
from .home import ClusterError
from .settings import Settings

DRIVER = "gpu.example.com"
"""Name of the driver, and of the DeviceClass of all its devices."""

EXTENDED_RESOURCE = "example.com/gpu"
"""The same devices, for containers that ask for a number of them and know nothing of claims."""

MEMORY = Path("/run/devices")
"""Folder of a node with the file of each device's memory."""

_API = "/apis/resource.k8s.io/v1"


def device_class() -> dict[str, object]:
    selector = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": DRIVER},
        "spec": {"selectors": [selector], "extendedResourceName": EXTENDED_RESOURCE},
    }


def declare(settings: Settings) -> None:
    """Make the DeviceClass, if the cluster's nodes have devices."""
    if not settings.devices:
        return
    api = ApiServer(settings.address, settings.api_port, settings.pki)
    status, answer = api.request(f"{_API}/deviceclasses", "POST", device_class())
    if status != 201:
        raise ClusterError(f"the API server refused the class of the fake devices: {answer}")


def service(settings: Settings, node: str) -> dict[str, list[str]]:
    """Return the driver's command line by its name; nothing if nodes have no devices."""
    if not settings.devices:
        return {}
    flags = {
        "node": node,
        # The kubelet's own: a node may publish its devices and read the claims of its pods.
        "kubeconfig": f"{node_files.ETC}/kubelet.kubeconfig",
        "devices": settings.devices,
        "cdi": node_files.CDI,
        "memory": MEMORY,
    }
    return {"fakedevices": ["fakedevices", *(f"--{k}={v}" for k, v in flags.items())]}


def published(settings: Settings, api: ApiServer, node: str) -> bool:
    """Whether the scheduler can see all devices of the node."""
    if not settings.devices:
        return True
    status, slices = api.request(f"{_API}/resourceslices?fieldSelector=spec.nodeName%3D{node}")
    found = slices["items"] if status == 200 else []
    return sum(len(each["spec"].get("devices", [])) for each in found) == settings.devices
