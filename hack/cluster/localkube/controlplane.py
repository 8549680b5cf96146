"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler as plain processes."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from . import pki, processes
from .apiserver import ApiServer
from .home import ClusterError, binaries
from .settings import LOOPBACK, Settings

COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
START_SECONDS = 120
"""Deadline of each start: far above the usual 3 s, for machines that are busy."""

# A service account's requests are what RBAC tests look at. The controllers' own accounts live in
# kube-system and would only drown them.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}


def start(settings: Settings) -> None:
    """Start everything and return when pods could be created."""
    pki.make_control_plane(settings.pki, settings.address, settings.network.service_api)
    _write_kubeconfigs(settings)
    _start_etcd(settings)
    _start_api_server(settings)
    api = ApiServer(settings.address, settings.api_port, settings.pki)

    def wait(problem: str, ready: Callable[[], bool], alive: Sequence[str] = COMPONENTS) -> None:
        processes.await_true(settings.state, alive, ready, problem, START_SECONDS)

    wait("the API server is not ready", lambda: api.ok("/readyz"), COMPONENTS[:2])
    start_controller_manager(settings)
    _start_scheduler(settings)
    for port in (settings.controller_manager_port, settings.scheduler_port):
        wait("a controller is not healthy", partial(_healthy, port))
    _grant_dns(api)
    # Without its default service account a namespace admits no pod.
    account = "/api/v1/namespaces/default/serviceaccounts/default"
    wait("the default service account is missing", lambda: api.ok(account))


def _grant_dns(api: ApiServer) -> None:
    """Let the nodes' CoreDNS look names up: no role of Kubernetes does."""
    group = "rbac.authorization.k8s.io"
    name = "system:coredns"
    listed = {"core": ["services", "pods", "namespaces"], "discovery.k8s.io": ["endpointslices"]}
    rules = [
        {"apiGroups": ["" if g == "core" else g], "resources": r, "verbs": ["list", "watch"]}
        for g, r in listed.items()
    ]
    role = {"kind": "ClusterRole", "metadata": {"name": name}, "rules": rules}
    binding = {
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": group, "kind": "User", "name": name}],
    }
    for resource, body in (("clusterroles", role), ("clusterrolebindings", binding)):
        path = f"/apis/{group}/v1/{resource}"
        status, answer = api.request(path, "POST", {"apiVersion": f"{group}/v1", **body})
        if status != 201:
            raise ClusterError(f"the API server refused the role of CoreDNS: {answer}")


def is_running(settings: Settings) -> bool:
    return all(processes.recorded(settings.state, component) for component in COMPONENTS)


def _write_kubeconfigs(settings: Settings) -> None:
    authority = settings.pki / "ca.crt"

    def write(path: Path, user: str) -> None:
        entry = pki.certificate_user(settings.pki, user)
        pki.write_private(path, pki.kubeconfig(settings.server, authority, entry))

    write(settings.kubeconfig, "admin")
    for component in (*COMPONENTS[2:], pki.KWOK):
        write(settings.pki / f"{component}.kubeconfig", component)


def _start_etcd(settings: Settings) -> None:
    client = f"http://{LOOPBACK}:{settings.etcd_port}"
    peer = f"http://{LOOPBACK}:{settings.etcd_peer_port}"
    config = {
        "name": "local",
        "data-dir": str(settings.state / "etcd"),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"local={peer}",
        "log-level": "warn",
        # One member that nobody has to wait for: elect at once, don't wait for the disk.
        "heartbeat-interval": 20,
        "election-timeout": 200,
        "unsafe-no-fsync": True,
        # In nanoseconds. Unset it is 0 here, and every request is logged as slow.
        "warning-unary-request-duration": 300_000_000,
        # Scale tests write thousands of objects; the default of 2 GiB is kept clear of.
        "quota-backend-bytes": 4 << 30,
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "5m",
    }
    path = settings.state / "etcd.yaml"
    path.write_text(json.dumps(config))
    processes.spawn(settings.state, "etcd", [binaries() / "etcd", "--config-file", path])


def _start_api_server(settings: Settings) -> None:
    keys = settings.pki
    policy = settings.state / "audit-policy.json"
    policy.write_text(json.dumps(_AUDIT_POLICY))
    flags = {
        "bind-address": settings.address,
        "secure-port": settings.api_port,
        # Endpoint of the Service `kubernetes`; a loopback address would be refused.
        "advertise-address": settings.network.host,
        "etcd-servers": f"http://{LOOPBACK}:{settings.etcd_port}",
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "allow-privileged": "true",
        "client-ca-file": keys / "ca.crt",
        "tls-cert-file": keys / "apiserver.crt",
        "tls-private-key-file": keys / "apiserver.key",
        "kubelet-client-certificate": keys / "apiserver-kubelet.crt",
        "kubelet-client-key": keys / "apiserver-kubelet.key",
        "kubelet-preferred-address-types": "InternalIP",
        "service-account-issuer": "https://kubernetes.default.svc.cluster.local",
        "service-account-key-file": keys / "service-accounts.pub",
        "service-account-signing-key-file": keys / "service-accounts.key",
        "service-cluster-ip-range": settings.network.services,
        "requestheader-client-ca-file": keys / "front-proxy-ca.crt",
        "requestheader-allowed-names": "front-proxy-client",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-username-headers": "X-Remote-User",
        "proxy-client-cert-file": keys / "front-proxy.crt",
        "proxy-client-key-file": keys / "front-proxy.key",
        "enable-aggregator-routing": "true",
        "audit-policy-file": policy,
        "audit-log-path": settings.audit_log,
        "audit-log-maxsize": 1000,
        "profiling": "false",
    }
    _spawn(settings, "kube-apiserver", flags)


def start_controller_manager(settings: Settings) -> None:
    """Start the controllers, among them the one that declares nodes dead."""
    keys = settings.pki
    flags = {
        **_client_flags(settings, "kube-controller-manager"),
        "secure-port": settings.controller_manager_port,
        "horizontal-pod-autoscaler-sync-period": "3s",  # 15 s by default, which tests would wait for
        "controllers": "*,bootstrapsigner,tokencleaner",
        "root-ca-file": keys / "ca.crt",
        "cluster-signing-cert-file": keys / "ca.crt",
        "cluster-signing-key-file": keys / "ca.key",
        "service-account-private-key-file": keys / "service-accounts.key",
        "service-cluster-ip-range": settings.network.services,
        "use-service-account-credentials": "true",
        "node-monitor-period": "1s",
        "node-monitor-grace-period": f"{settings.node_grace_seconds}s",
    }
    _spawn(settings, "kube-controller-manager", flags)


def _start_scheduler(settings: Settings) -> None:
    flags = {
        **_client_flags(settings, "kube-scheduler"),
        "secure-port": settings.scheduler_port,
    }
    _spawn(settings, "kube-scheduler", flags)


def _client_flags(settings: Settings, component: str) -> dict[str, object]:
    config = settings.pki / f"{component}.kubeconfig"
    return {
        "kubeconfig": config,
        "authentication-kubeconfig": config,
        "authorization-kubeconfig": config,
        "bind-address": LOOPBACK,
        "leader-elect": "false",
        # With the default of 20 the controllers alone take 5 s to start.
        "kube-api-qps": 500,
        "kube-api-burst": 1000,
    }


def _spawn(settings: Settings, component: str, flags: dict[str, object]) -> None:
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    processes.spawn(settings.state, component, [binaries() / component, *arguments])


def _healthy(port: int) -> bool:
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    # A proxy from the environment must not see a request to this machine.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified)
    )
    try:
        with opener.open(f"https://{LOOPBACK}:{port}/healthz", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
