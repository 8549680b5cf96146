"""Keys, certificates and kubeconfigs, made by the openssl command."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path

from .home import ClusterError

# Explicit and minimal: the machine's openssl.cnf would add CA:TRUE to every certificate.
_CONFIG = "[req]\ndistinguished_name=dn\n[dn]\n"
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
KWOK = "kwok"
"""Its name as a user of the API server."""
SERVICE_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")


class Authority:
    """A certificate authority in `folder`, made on first use."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.certificate = folder / f"{name}.crt"
        self._key = folder / f"{name}.key"
        if not self.certificate.exists():
            _request(
                folder, name, f"/CN=rollout-{name}",
                "basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign",
            )  # fmt: skip

    def issue(self, name: str, subject: str, *, usage: str = "clientAuth", san: str = "") -> None:
        """Write `<name>.crt` and `<name>.key` unless they are there."""
        if (self.folder / f"{name}.crt").exists():
            return
        extensions = ["keyUsage=critical,digitalSignature", f"extendedKeyUsage={usage}"]
        if san:
            extensions.append(f"subjectAltName={san}")
        _request(
            self.folder, name, subject, *extensions,
            signer=["-CA", str(self.certificate), "-CAkey", str(self._key)],
        )  # fmt: skip


def make_control_plane(folder: Path, address: str, service_address: str) -> Authority:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    authority = Authority(folder, "ca")
    names = ",".join(f"DNS:{name}" for name in ("localhost", *SERVICE_NAMES))
    authority.issue(
        "apiserver", "/CN=kube-apiserver", usage="serverAuth",
        san=f"{names},DNS:kubernetes.default.svc.cluster.local,IP:{address},IP:{service_address}",
    )  # fmt: skip
    authority.issue("apiserver-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet-client")
    authority.issue("admin", "/O=system:masters/CN=cluster-admin")
    authority.issue(KWOK, f"/O=system:masters/CN={KWOK}")
    for component in ("kube-controller-manager", "kube-scheduler"):
        authority.issue(component, f"/CN=system:{component}")
    Authority(folder, "front-proxy-ca").issue("front-proxy", "/CN=front-proxy-client")
    public = folder / "service-accounts.pub"
    if not public.exists():
        key = folder / "service-accounts.key"
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key))
        _openssl("ec", "-in", str(key), "-pubout", "-out", str(public))
    return authority


def kubeconfig(server: str, authority: Path, user: dict[str, str]) -> str:
    """Return a kubeconfig (JSON is YAML) for one user of one cluster."""
    cluster = {"server": server, "certificate-authority-data": _encoded(authority)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "rollout", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "rollout", "context": {"cluster": "rollout", "user": "user"}}],
        "current-context": "rollout",
    }
    return json.dumps(config, indent=1) + "\n"


def certificate_user(folder: Path, name: str) -> dict[str, str]:
    return {
        "client-certificate-data": _encoded(folder / f"{name}.crt"),
        "client-key-data": _encoded(folder / f"{name}.key"),
    }


def write_private(path: Path, text: str) -> Path:
    """Write a file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _request(
    folder: Path, name: str, subject: str, *extensions: str, signer: list[str] | None = None
) -> None:
    config = folder / "openssl.cnf"
    config.write_text(_CONFIG)
    added = [word for extension in extensions for word in ("-addext", extension)]
    _openssl(
        "req", "-x509", "-config", str(config), *_NEW_KEY, "-days", "3650", "-subj", subject,
        "-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt"),
        *added, *(signer or []),
    )  # fmt: skip


def _openssl(*arguments: str) -> None:
    if shutil.which("openssl") is None:
        raise ClusterError("openssl is missing: install it (Debian: apt-get install openssl)")
    done = subprocess.run(
        ["openssl", *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode:
        raise ClusterError(f"openssl {arguments[0]} failed: {done.stderr.strip()}")
