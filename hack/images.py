#!/usr/bin/env python3
"""Images for the local cluster, without a container engine: debootstrap makes a base, buildah the rest.

    sudo python3 hack/images.py                 # build what changed, into the cache's images/
    sudo python3 hack/images.py --load          # ... and import it into every node of a cluster
    sudo python3 hack/images.py --gpu           # build each complete image, check it, remove it
    sudo python3 hack/images.py --gpu vllm --keep

The cluster's worker image is the light one: it holds our code and its web framework. The heavy engine
environment is mounted from this machine, instead of being copied into every node. The complete images come from the same Dockerfile; they take 10 GB and more, so one is
built at a time, in a store of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "cluster"))

import check_image
from buildah import BASE, PACKAGES, SUITE, Store, is_current, stamp_file
from imagecheck.versions import ENGINES
from localkube import Cluster, ClusterError, debian, preflight
from localkube.home import DEFAULT_NAME, REPOSITORY, cache, exclusive, images, say, step
from rollout_local import ENVIRONMENT_MOUNT

_SOURCES = ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE",
            "operator", "worker", "client", "common", "hack/hatch_build.py", "hack/image")  # fmt: skip
RELEASE = ".".join(map(str, preflight.PYTHON_RELEASE))
GPU_SECONDS = 5400
# Wheels, what they unpack to, and the layer made of that; 15 GiB stay for the rest of the machine.
GPU_GIB = 45


@dataclass(frozen=True, slots=True)
class Image:
    """An image of the Dockerfile: its target, and the requirements its dependencies come from."""

    name: str
    target: str
    requirements: str
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        return f"localhost/{self.name}:dev"

    @property
    def archive(self) -> Path:
        return images() / f"{self.name}.tar"


IMAGES = (
    Image("rollout-operator", "operator", "operator"),
    Image(
        "rollout-worker-hf",
        "worker",
        "worker",
        {
            "ENGINE_SITE_PACKAGES": f"{ENVIRONMENT_MOUNT}/lib/python{RELEASE}/site-packages",
        },
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", action="store_true", help="import them into a cluster's nodes")
    parser.add_argument("--name", default=DEFAULT_NAME, help="that cluster (default: %(default)s)")
    parser.add_argument(
        "--gpu", nargs="*", choices=ENGINES, metavar="ENGINE",
        help=f"build and check complete images: {', '.join(ENGINES)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="with --gpu: don't remove them again")
    arguments = parser.parse_args()
    try:
        if arguments.gpu is not None:
            return build_gpu(arguments.gpu or ENGINES, keep=arguments.keep)
        build()
        if arguments.load:
            load(Cluster.attach(arguments.name))
    except ClusterError as error:
        say(f"error: {error}")
        return 2
    return 0


def build() -> list[Path]:
    """Build every image whose inputs changed; returns all archives."""
    preflight.python()
    outdated = [image for image in IMAGES if not is_current(image.archive, _inputs(image))]
    if outdated:
        preflight.root("building images")
        debian.ensure(debian.IMAGE_PACKAGES)
        preflight.writable_cache()
        preflight.disk(preflight.RUN_GIB)
        with exclusive("images"):
            for image in outdated:
                with step(f"image {image.name}"):
                    _build(image)
    return [image.archive for image in IMAGES]


def build_gpu(engines: Sequence[str], *, keep: bool) -> int:
    """Build and check the complete image of each engine; returns the greatest exit status."""
    preflight.root("building images")
    debian.ensure(debian.IMAGE_PACKAGES)
    preflight.writable_cache()
    store, worst = Store(cache() / "buildah-gpu", GPU_SECONDS), 0
    with exclusive(store.folder.name):
        with step("what all engines need of the system"):
            store.build("engine", "localhost/rollout-engine:gpu", {})
        for engine in engines:
            preflight.disk(GPU_GIB)
            reference = f"localhost/rollout-worker-{engine}:gpu"
            with step(f"image {reference}"):
                store.build(f"worker-{engine}", reference, {})
            worst = max(worst, check_image.check(store, reference, engine))
            if not keep:
                store.do("rmi", "--force", reference)
                store.do("rmi", "--prune")
        if not keep:
            shutil.rmtree(store.folder)
    return worst


def load(cluster: Cluster) -> None:
    """Import the images into every living node that lacks these bytes."""
    for image in IMAGES:
        with step(f"import {image.name}"):
            cluster.load_image(image.archive)


def _build(image: Image) -> None:
    stamp = _inputs(image)
    image.archive.parent.mkdir(parents=True, exist_ok=True)
    partial = image.archive.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    store = Store(cache() / "buildah")
    store.build(image.target, image.reference, image.arguments)
    store.do(
        "push", "--quiet", "--disable-compression", image.reference,
        f"oci-archive:{partial}:{image.reference}",
    )  # fmt: skip
    partial.replace(image.archive)
    stamp_file(image.archive).write_text(stamp)


def _inputs(image: Image) -> str:
    """Hash what an image is made of: of our sources, what the build gets to see."""
    digest = hashlib.sha256(f"{BASE} {SUITE} {PACKAGES} {image}".encode())
    for name in (*_SOURCES, f"requirements/{image.requirements}.txt"):
        path = REPOSITORY / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            # The library of an editable install comes while images are built.
            if file.is_file() and file.parent.name != "__pycache__" and file.suffix != ".so":
                digest.update(str(file.relative_to(REPOSITORY)).encode() + b"\0")
                digest.update(file.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
