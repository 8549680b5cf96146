"""Every binary of a cluster, compiled once from Go modules into the cache.

Most are packages of one module, so that shared code is compiled once: half of each is Kubernetes' client.

A binary is compiled again only if its inputs changed: a stamp next to it holds a hash of its version,
flags and sources. An interrupted build continues where it stopped, since Go caches packages.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import debian, oci, preflight
from .home import SOURCES, ClusterError, binaries, cache, exclusive, images, read_tail, say, step
from .node_files import PAUSE_IMAGE

KUBERNETES = "v1.36.3"
PROGRESS_SECONDS = 10
BUILD_SECONDS = 3600

_VERSION = "k8s.io/component-base/version"
_PROGRAMS = (
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl",
    "kubelet",
)  # fmt: skip
_CONTAINERD = "github.com/containerd/containerd/v2/cmd/{}@v2.4.2"


@dataclass(frozen=True, slots=True)
class Component:
    """A binary: a package that our own module has or requires, or `package@version`, by itself."""

    name: str
    package: str
    link_flags: str = ""
    tags: str = ""
    links: tuple[str, ...] = ()
    module: str = ""
    """`module@version` in whose folder it is built, since it has replacements, which `go install` refuses."""

    @property
    def folder(self) -> Path:
        return _module_path(self.module) if self.module else SOURCES

    @property
    def command(self) -> list[str]:
        # The linker drops debug information, so the compiler need not make it: 6 % less work.
        flags = ["-v", "-gcflags=all=-dwarf=false", "-ldflags", f"-s -w {self.link_flags}".strip()]
        if self.tags:
            flags += ["-tags", self.tags]
        if "@" in self.package:
            return ["go", "install", *flags, self.package]
        return ["go", "build", *flags, "-o", str(binaries() / self.name), self.package]

    def stamp(self) -> str:
        module = (self.module,) if self.module else ()
        made_of = (self.package, self.link_flags, self.tags, preflight.GO_RELEASE, *module)
        digest = hashlib.sha256(" ".join(made_of).encode())
        for path in self._sources():
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def _sources(self) -> list[Path]:
        if self.module or "@" in self.package:
            return []
        own = (SOURCES / self.package).glob("*.go") if self.package.startswith("./") else ()
        return [SOURCES / "go.mod", SOURCES / "go.sum", *sorted(own)]

    @property
    def stamp_file(self) -> Path:
        return binaries() / f".{self.name}.stamp"

    def is_current(self) -> bool:
        binary, stamp = binaries() / self.name, self.stamp_file
        return binary.exists() and stamp.exists() and stamp.read_text() == self.stamp()


COMPONENTS = (
    Component(
        "kube",
        "./kube",
        # Unset, the server would call itself v0.0.0-master.
        link_flags=f"-X {_VERSION}.gitVersion={KUBERNETES} "
        f"-X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=36",
        links=_PROGRAMS,
    ),
    Component("pause", "./pause"),
    Component("coredns", "./coredns"),
    Component("fakedevices", "./fakedevices"),
    Component("helm", "helm.sh/helm/v4/cmd/helm"),
    Component("kwok", "sigs.k8s.io/kwok/cmd/kwok"),
    # Separate modules: containerd needs a newer interface of container runtimes than this Kubernetes has.
    *(
        Component(name, _CONTAINERD.format(name), tags="no_btrfs,no_devmapper,no_zfs")
        for name in ("containerd", "containerd-shim-runc-v2", "ctr")
    ),
)
ON_DEMAND = (
    # Its Kubernetes is 1.33, and it schedules the pods of a newer API server.
    Component("gang-scheduler", "./cmd/scheduler", module="sigs.k8s.io/scheduler-plugins@v0.33.5"),
)
"""Built only if they are named."""


def build(names: Sequence[str] = (), *, without: Collection[str] = ()) -> None:
    """Build what is missing or outdated, of all components or of those named, `without` some."""
    known = {component.name: component for component in (*COMPONENTS, *ON_DEMAND)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ClusterError(f"unknown component {unknown[0]!r}: one of {', '.join(known)}")
    preflight.writable_cache()
    with exclusive("build"):
        _build(known, names, without)


def _build(known: Mapping[str, Component], names: Sequence[str], without: Collection[str]) -> None:
    wanted = [known[name] for name in names] or list(COMPONENTS)
    wanted = [component for component in wanted if component.name not in without]
    outdated = [component for component in wanted if not component.is_current()]
    if outdated:
        preflight.go()
        preflight.disk(preflight.BUILD_GIB)
        binaries().mkdir(parents=True, exist_ok=True)
        say(f"building {len(outdated)} of {len(COMPONENTS)} binaries into {binaries()}")
    for component in outdated:
        with step(component.name):
            _compile(component)
    if not (images() / "pause.tar").exists() or any(c.name == "pause" for c in outdated):
        _pack_pause()
    if not names:
        debian.unpack_prometheus()


def module_folder(module: str) -> Path:
    """Return Go's folder with the sources of a module that ours requires."""
    required = (line.split() for line in (SOURCES / "go.mod").read_text().splitlines())
    version = next(words[1] for words in required if words[:1] == [module])
    return _module_path(f"{module}@{version}")


def _module_path(module: str) -> Path:
    return cache() / "go/pkg/mod" / module


def _compile(component: Component) -> None:
    log = cache() / "logs" / f"build-{component.name}.log"
    log.parent.mkdir(exist_ok=True)
    if component.module:
        download = ["go", "mod", "download", component.module]
        subprocess.run(download, cwd=cache(), env=_environment(), check=True)
    with (
        log.open("w") as file,
        subprocess.Popen(
            component.command,
            cwd=component.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        _await(process, component.name, log)
    if process.returncode:
        raise ClusterError(f"building {component.name} failed, see {log}:\n{read_tail(log)}")
    for name in component.links:
        link = binaries() / name
        link.unlink(missing_ok=True)
        link.symlink_to(component.name)
    component.stamp_file.write_text(component.stamp())


def _await(process: subprocess.Popen[bytes], name: str, log: Path) -> None:
    began = time.monotonic()
    while True:
        try:
            process.wait(PROGRESS_SECONDS)
            return
        except subprocess.TimeoutExpired:
            elapsed = time.monotonic() - began
            newest = read_tail(log).rpartition("\n")[2] or "starting"
            say(f"    {name}: {elapsed:4.0f} s, now {newest}")
            if elapsed > BUILD_SECONDS:
                process.kill()
                raise ClusterError(f"{name} was not built in {BUILD_SECONDS} s") from None


def _environment() -> dict[str, str]:
    # Writable module cache: `rm -rf` of the cache must work without root.
    flags = f"{os.environ.get('GOFLAGS', '')} -trimpath -buildvcs=false -modcacherw"
    return {
        **os.environ,
        "GOBIN": str(binaries()),
        "GOPATH": str(cache() / "go"),
        "GOCACHE": str(cache() / "go-build"),
        "GOFLAGS": flags.strip(),
        # Compilers that collect garbage less often need a fifth less time, and more memory.
        "GOGC": os.environ.get("GOGC", "400"),
        "GOMEMLIMIT": os.environ.get("GOMEMLIMIT", "2GiB"),
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
        "CGO_ENABLED": "0",
    }


def _pack_pause() -> None:
    with tempfile.TemporaryDirectory(dir=cache()) as folder:
        root = Path(folder)
        (root / "pause").write_bytes((binaries() / "pause").read_bytes())
        (root / "pause").chmod(0o755)
        oci.write_archive(root, PAUSE_IMAGE, images() / "pause.tar", ["/pause"])
