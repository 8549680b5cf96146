"""OCI layouts as archives, made with the standard library alone: an image of a folder's files, and others' content."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_MEDIA = "application/vnd.oci.image"
MANIFEST = f"{_MEDIA}.manifest.v1+json"


def write_archive(root: Path, reference: str, archive: Path, command: list[str]) -> None:
    """Write `archive`, an image of the files below `root` that is known as `reference`.

    The same files give the same bytes: times are left out, entries are sorted.
    """
    machine = platform.machine()
    target = {"architecture": _ARCHITECTURES.get(machine, machine), "os": "linux"}
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=archive.parent) as layer:
        digest, size = _write_layer(root, layer)
        config = encoded(
            {
                **target,
                "config": {"Env": [_PATH], "Cmd": command},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
                # One entry a layer, or buildah can't build on it.
                "history": [{"created_by": "rollout hack/cluster"}],
            }
        )
        manifest = image_manifest(
            descriptor(f"{_MEDIA}.config.v1+json", config),
            _entry(f"{_MEDIA}.layer.v1.tar", digest, size),
        )
        names = {
            "io.containerd.image.name": reference,
            "org.opencontainers.image.ref.name": reference,
        }
        partial = archive.with_suffix(".partial")
        with tarfile.open(partial, "w") as tar:
            add_layout(tar, manifest, {"annotations": names, "platform": target}, [config])
            layer.seek(0)
            tar.addfile(_info(_blob(digest), size), layer)
    partial.replace(archive)


def image_manifest(config: dict[str, object], layer: dict[str, object]) -> bytes:
    """Return the manifest of an image, or whatever else a registry keeps, with one layer."""
    kind = {"schemaVersion": 2, "mediaType": MANIFEST}
    return encoded({**kind, "config": config, "layers": [layer]})


def add_layout(
    tar: tarfile.TarFile, manifest: bytes, about: Mapping[str, object], blobs: Iterable[bytes]
) -> None:
    """Add what makes an archive an OCI layout: the index, a manifest and blobs; `about` stands in the index."""
    index = {"schemaVersion": 2, "manifests": [{**descriptor(MANIFEST, manifest), **about}]}
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": encoded(index)}
    files |= {_blob(hashlib.sha256(each).hexdigest()): each for each in (*blobs, manifest)}
    for name, data in files.items():
        tar.addfile(_info(name, len(data)), io.BytesIO(data))


def _write_layer(root: Path, layer: IO[bytes]) -> tuple[str, int]:
    def clean(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.mtime = 0
        return None if entry.ischr() or entry.isblk() else entry

    with tarfile.open(fileobj=layer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted(os.listdir(root)):
            tar.add(root / name, arcname=name, filter=clean)
    layer.seek(0)
    digest = hashlib.sha256()
    while block := layer.read(1 << 20):
        digest.update(block)
    return digest.hexdigest(), layer.tell()


def encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _entry(media: str, digest: str, size: int) -> dict[str, object]:
    return {"mediaType": media, "digest": f"sha256:{digest}", "size": size}


def descriptor(media: str, blob: bytes) -> dict[str, object]:
    return _entry(media, hashlib.sha256(blob).hexdigest(), len(blob))


def _blob(digest: str) -> str:
    return f"blobs/sha256/{digest}"


def _info(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    return info
