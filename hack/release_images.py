"""Images of a release as OCI archives with labels, and its chart as an OCI layout that registries take."""

from __future__ import annotations

import tarfile
from datetime import datetime
from pathlib import Path

import yaml

from buildah import BASE, Store
from localkube import debian, oci, preflight
from localkube.home import cache, exclusive

_LABEL = "org.opencontainers.image"
_HELM = "application/vnd.cncf.helm"


def build_image(target: str, version: str, revision: str, created: str, out: Path) -> Path:
    """Build a target of the Dockerfile and write its OCI archive (root).

    `revision`: the commit; `created`: its time, which the image has, too.
    Its base is the Debian of the local cluster's images; the workflow of releases has the Dockerfile's own.
    """
    preflight.root("building images")
    debian.ensure(debian.IMAGE_PACKAGES)
    name = f"rollout-{target}"
    archive, reference = out / f"{name}-{version}-image.oci.tar", f"{name}:{version}"
    labels = {
        f"{_LABEL}.title": name,
        f"{_LABEL}.version": version,
        f"{_LABEL}.revision": revision,
        f"{_LABEL}.created": created,
        f"{_LABEL}.licenses": "Apache-2.0",
        f"{_LABEL}.base.name": BASE,
    }
    seconds = int(datetime.fromisoformat(created).timestamp())
    words = [f"--label={label}={value}" for label, value in labels.items()]
    with exclusive("images"):
        store = Store(cache() / "buildah")
        store.build(target, f"localhost/{reference}", {})
        # Of cached layers, a build would keep the labels and the time of the build before.
        container = store.ask("from", f"localhost/{reference}").strip()
        try:
            store.do("config", *words, container)
            stamped = ("commit", "--quiet", "--timestamp", str(seconds), container)
            store.do(*stamped, f"localhost/{reference}")
        finally:
            store.do("rm", container)
        store.do("push", "--quiet", f"localhost/{reference}", f"oci-archive:{archive}:{reference}")
    return archive


def write_chart_layout(package: Path, archive: Path) -> None:
    """Write a packaged chart as the OCI layout that `helm push` would make of it in a registry.

    Media types: Helm's documentation of OCI registries. The same package gives the same bytes.
    """
    content = package.read_bytes()
    with tarfile.open(package) as tar:
        chart = next(
            name for name in tar.getnames() if name.count("/") == 1 and name.endswith("/Chart.yaml")
        )
        member = tar.extractfile(chart)
        assert member is not None, "a file"
        about = yaml.safe_load(member)
    config = oci.encoded(about)
    manifest = oci.image_manifest(
        oci.descriptor(f"{_HELM}.config.v1+json", config),
        oci.descriptor(f"{_HELM}.chart.content.v1.tar+gzip", content),
    )
    name = {"annotations": {f"{_LABEL}.ref.name": str(about["version"])}}
    with tarfile.open(archive, "w") as tar:
        oci.add_layout(tar, manifest, name, [config, content])
