"""Configuration files of a node, as a pure function of the cluster and the node's index."""

from __future__ import annotations

import json

from .settings import DNS_ADDRESS, Settings

ETC = "/run/node"
"""Where a node sees its own configuration."""

CDI = "/run/cdi"
"""Where a node keeps the CDI files that tell containers of their devices."""

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
PAUSE_IMAGE = "localhost/pause:1"

_CONTAINERD = f"""\
version = 3
root = "/run/containerd-root"
state = "/run/containerd"
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  # What the driver of the fake devices writes for each claim; /etc is the machine's.
  enable_cdi = true
  cdi_spec_dirs = ["{CDI}"]
  # Without CAP_SYS_RESOURCE a score below our own can't be set.
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "{ETC}/cni"
"""

_DISK = ("nodefs.available", "imagefs.available", "nodefs.inodesFree")

# A TTL of 1 s: tests look at names that come and go.
# hack/cluster/coredns holds these plugins and no others.
_COREFILE = """\
.:53 {{
  bind {address}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {etc}/coredns.kubeconfig
    pods insecure
    ttl 1
  }}
  cache 1
}}
"""


def files(settings: Settings, index: int) -> dict[str, str]:
    """Return the texts of the node's files by their path below its configuration folder."""
    network = settings.network
    return {
        "containerd.toml": _CONTAINERD,
        "Corefile": _COREFILE.format(address=DNS_ADDRESS, etc=ETC),
        "resolv.conf": f"nameserver {DNS_ADDRESS}\n",
        "cni/10-pods.conflist": json.dumps(_pod_network(network.node_pods(index))),
        "kubelet.yaml": json.dumps(_kubelet(network.node(index), DNS_ADDRESS)),
        "kube-proxy.yaml": json.dumps(_proxy(settings, index)),
    }


def _pod_network(cidr: str) -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "dataDir": "/run/cni",
            "ranges": [[{"subnet": cidr}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    host_ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, host_ports]}


def _kubelet(address: str, dns: str) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{ETC}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "healthzBindAddress": "127.0.0.1",
        "clusterDNS": [dns],
        "clusterDomain": "cluster.local",
        "resolvConf": f"{ETC}/resolv.conf",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": "/",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "serializeImagePulls": False,
        # Short, so that a dead node shows within the control plane's grace of 10 s.
        "nodeStatusUpdateFrequency": "2s",
        "nodeStatusReportFrequency": "10s",
        "nodeLeaseDurationSeconds": 8,
        "syncFrequency": "10s",
        "fileCheckFrequency": "5s",
        "volumeStatsAggPeriod": "60s",
        # Images can't be pulled again here: none may be collected, nothing evicted for disk.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", **dict.fromkeys(_DISK, "1%")},
        "maxPods": 200,
        "shutdownGracePeriod": "0s",
        "containerLogMaxSize": "10Mi",
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
    }


def _proxy(settings: Settings, index: int) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "bindAddress": settings.network.node(index),
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "clusterCIDR": settings.network.pods,
        "clientConnection": {"kubeconfig": f"{ETC}/kube-proxy.kubeconfig"},
        # These limits are the machine's; a node must leave them alone.
        "conntrack": {"maxPerCore": 0, "min": 0},
        "nftables": {"minSyncPeriod": "200ms", "syncPeriod": "30s"},
        "hostnameOverride": f"node-{index}",
    }
