#!/usr/bin/env python3
"""Images for the local cluster, without a container engine: debootstrap makes a base, buildah the rest.

    sudo python3 hack/images.py                 # build what changed, into the cache's images/
    sudo python3 hack/images.py --load          # ... and import it into every node of a cluster

The worker image is the light one: it holds our code and its web framework. The heavy engine
environment is mounted from this machine (`cluster.py env-volume`), instead of being copied into
every node. Elsewhere, `docker build --target worker-hf .` makes the complete image.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "cluster"))

from localkube import Cluster, ClusterError, debian, oci, preflight, volumes
from localkube.home import DEFAULT_NAME, REPOSITORY, cache, exclusive, images, say, step

BASE = "localhost/python:3.11"
_SUITE = "bookworm"
# libnuma1 is what vLLM's CPU build links against.
_PACKAGES = "python3,python3-venv,ca-certificates,libnuma1"
# Not needed in an image, and half of it.
_PRUNED = ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man",
           "usr/share/locale", "var/log")  # fmt: skip
_SOURCES = ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE",
            "operator", "worker", "client")  # fmt: skip
_PIP_SETTINGS = (
    "cert", "default-timeout", "extra-index-url", "index-url", "proxy", "retries", "trusted-host",
)  # fmt: skip
BUILD_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Image:
    """An image of the Dockerfile: its target, and the requirements its dependencies come from."""

    name: str
    target: str
    requirements: str
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """What manifests call it."""
        return f"localhost/{self.name}:dev"

    @property
    def archive(self) -> Path:
        """The OCI archive that nodes import."""
        return images() / f"{self.name}.tar"


IMAGES = (
    Image("rollout-operator", "operator", "operator"),
    Image(
        "rollout-worker-hf",
        "worker-hf",
        "worker",
        {
            "WORKER_EXTRAS": "worker",
            "ENGINE_SITE_PACKAGES": f"{volumes.ENVIRONMENT_MOUNT}/lib/python3.11/site-packages",
        },
    ),
)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", action="store_true", help="import them into a cluster's nodes")
    parser.add_argument("--name", default=DEFAULT_NAME, help="that cluster (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        build()
        if arguments.load:
            load(Cluster.attach(arguments.name))
    except ClusterError as error:
        say(f"error: {error}")
        return 2
    return 0


def build() -> list[Path]:
    """Build every image whose inputs changed; returns all archives.

    Raises:
        ClusterError: the surroundings don't allow it, or a step failed.
    """
    outdated = [image for image in IMAGES if not _is_current(image.archive, _inputs(image))]
    if outdated:
        preflight.root("building images")
        debian.ensure(debian.IMAGE_PACKAGES)
        preflight.writable_cache()
        preflight.disk(preflight.RUN_GIB)
        with exclusive("images"):
            _ensure_base()
            for image in outdated:
                with step(f"image {image.name}"):
                    _build(image)
    return [image.archive for image in IMAGES]


def load(cluster: Cluster) -> None:
    """Import the images into every living node that has not got these very bytes."""
    for image in IMAGES:
        with step(f"import {image.name}"):
            cluster.load_image(image.archive)


def _build(image: Image) -> None:
    stamp = _inputs(image)
    image.archive.parent.mkdir(parents=True, exist_ok=True)
    arguments = {"BASE_IMAGE": BASE, **image.arguments}
    words = [
        word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")
    ]
    partial = image.archive.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with _pip_secrets() as secrets:
        _buildah(
            "build", "--isolation", "chroot", "--network", "host", "--layers", "--quiet",
            "--target", image.target, "--tag", image.reference, *words, *secrets, str(REPOSITORY),
        )  # fmt: skip
    _buildah(
        "push", "--quiet", "--disable-compression", image.reference,
        f"oci-archive:{partial}:{image.reference}",
    )  # fmt: skip
    partial.replace(image.archive)
    _stamp_file(image.archive).write_text(stamp)


def _ensure_base() -> None:
    """Make the base image and hand it to buildah, once."""
    archive = cache() / "images-base/python.tar"
    stamp = hashlib.sha256(f"{_SUITE} {_PACKAGES} {_PRUNED}".encode()).hexdigest()
    if _is_current(archive, stamp):
        return
    preflight.program("debootstrap")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        root = Path(folder, "root")
        with step(f"base image ({_SUITE})"):
            log = archive.with_suffix(".log")
            _run(
                ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(root)],
                log,
            )
            for name in _PRUNED:
                shutil.rmtree(root / name, ignore_errors=True)
                (root / name).mkdir()
            oci.write_archive(root, BASE, archive, ["python3"])
    with step("base image into buildah"):
        _buildah("pull", "--quiet", f"oci-archive:{archive}")
    _stamp_file(archive).write_text(stamp)


@contextmanager
def _pip_secrets() -> Iterator[list[str]]:
    """Yield the flags that give pip in the build this machine's index, proxy and authority."""
    settings = {name: value for name, value in _pip_settings().items() if name in _PIP_SETTINGS}
    with tempfile.TemporaryDirectory(dir=cache()) as folder:
        flags = []
        if authority := settings.get("cert"):
            shutil.copy(authority, Path(folder, "ca.pem"))
            settings["cert"] = "/run/secrets/ca.pem"
            flags += ["--secret", f"id=ca.pem,src={folder}/ca.pem"]
        lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
        Path(folder, "pip.conf").write_text(f"[global]\n{lines}")
        yield [*flags, "--secret", f"id=pip.conf,src={folder}/pip.conf"]


def _pip_settings() -> dict[str, str]:
    """Return pip's settings by option, those of the environment last, as it ranks them."""
    if shutil.which("pip") is None:
        return {}
    done = subprocess.run(
        ["pip", "config", "list"], capture_output=True, text=True, timeout=60, check=False
    )
    lines = [line.partition("=") for line in done.stdout.splitlines() if "=" in line]
    ranked = sorted(lines, key=lambda line: line[0].startswith(":env:"))
    return {name.rpartition(".")[2]: value.strip("'\"") for name, _, value in ranked}


def _inputs(image: Image) -> str:
    """Hash everything the image is made of."""
    digest = hashlib.sha256(f"{BASE} {_SUITE} {_PACKAGES} {image}".encode())
    for name in (*_SOURCES, f"requirements/{image.requirements}.txt"):
        path = REPOSITORY / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(REPOSITORY)).encode() + b"\0")
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _stamp_file(archive: Path) -> Path:
    return archive.with_suffix(".stamp")


def _is_current(archive: Path, stamp: str) -> bool:
    file = _stamp_file(archive)
    return archive.exists() and file.exists() and file.read_text() == stamp


def _buildah(*arguments: str) -> None:
    # In the cache, not in /var/lib: removing the cache removes everything.
    store = cache() / "buildah"
    places = ["--root", str(store / "root"), "--runroot", str(store / "run")]
    log = cache() / "logs" / "buildah.log"
    # In a mount namespace of its own, so that none of its mounts outlives it.
    command = ["unshare", "--mount", "buildah", *places, "--storage-driver", "overlay"]
    _run([*command, *arguments], log)


def _run(command: Sequence[str], log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=BUILD_SECONDS,
            check=False,
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
        raise ClusterError(f"{Path(command[0]).name} failed, see {log}:\n{tail}")


if __name__ == "__main__":
    sys.exit(main())
