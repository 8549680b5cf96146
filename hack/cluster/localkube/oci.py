"""An image of a folder's files as an OCI archive, made with the standard library alone."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
import tempfile
from pathlib import Path
from typing import IO

_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_MEDIA = "application/vnd.oci.image"


def write_archive(root: Path, reference: str, archive: Path, command: list[str]) -> None:
    """Write `archive`, an image of the files below `root` that is known as `reference`.

    The same files give the same bytes: times are left out, entries are sorted.
    """
    machine = platform.machine()
    target = {"architecture": _ARCHITECTURES.get(machine, machine), "os": "linux"}
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=archive.parent) as layer:
        digest, size = _write_layer(root, layer)
        config = {
            **target,
            "config": {"Env": [_PATH], "Cmd": command},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            # One entry a layer, or buildah can't build on it.
            "history": [{"created_by": "rollout hack/cluster"}],
        }
        partial = archive.with_suffix(".partial")
        with tarfile.open(partial, "w") as tar:
            manifest = {
                "schemaVersion": 2,
                "mediaType": f"{_MEDIA}.manifest.v1+json",
                "config": _add_blob(tar, f"{_MEDIA}.config.v1+json", config),
                "layers": [_entry(f"{_MEDIA}.layer.v1.tar", digest, size)],
            }
            names = {
                "io.containerd.image.name": reference,
                "org.opencontainers.image.ref.name": reference,
            }
            about = {"annotations": names, "platform": target}
            listed = {**_add_blob(tar, str(manifest["mediaType"]), manifest), **about}
            _add_file(tar, "index.json", _encoded({"schemaVersion": 2, "manifests": [listed]}))
            _add_file(tar, "oci-layout", _encoded({"imageLayoutVersion": "1.0.0"}))
            layer.seek(0)
            tar.addfile(_info(_blob(digest), size), layer)
    partial.replace(archive)


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


def _add_blob(tar: tarfile.TarFile, media: str, value: object) -> dict[str, object]:
    """Add what a digest refers to; return the reference."""
    data = _encoded(value)
    digest = hashlib.sha256(data).hexdigest()
    _add_file(tar, _blob(digest), data)
    return _entry(media, digest, len(data))


def _add_file(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    tar.addfile(_info(name, len(data)), io.BytesIO(data))


def _encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _entry(media: str, digest: str, size: int) -> dict[str, object]:
    return {"mediaType": media, "digest": f"sha256:{digest}", "size": size}


def _blob(digest: str) -> str:
    return f"blobs/sha256/{digest}"


def _info(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = size
    return info
