"""Buildah with its own store in the cache, and the base image of all images."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localkube import oci, preflight
from localkube.home import REPOSITORY, ClusterError, cache, read_tail, step

BASE = "localhost/python:3.11"
SUITE = "bookworm"
# libnuma1 is what vLLM's CPU build links against.
PACKAGES = "python3,python3-venv,ca-certificates,libnuma1"
# Half of an image, and not needed there.
PRUNED = ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man",
          "usr/share/locale", "var/log")  # fmt: skip
_PIP_SETTINGS = (
    "cert", "default-timeout", "extra-index-url", "index-url", "proxy", "retries", "trusted-host",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Store:
    """Images and layers in one folder; `seconds` is what one command may take."""

    folder: Path
    seconds: float = 1800

    def command(self, *arguments: str) -> list[str]:
        """Return buildah's command line; it wants a mount namespace of its own."""
        places = ["--root", str(self.folder / "root"), "--runroot", str(self.folder / "run")]
        return ["buildah", *places, "--storage-driver", "overlay", *arguments]

    def do(self, *arguments: str) -> None:
        """Run buildah; its output goes to a log."""
        # In a mount namespace of its own, so that none of its mounts outlives it.
        command = ["unshare", "--mount", *self.command(*arguments)]
        run(command, cache() / "logs" / f"{self.folder.name}.log", self.seconds, self._temporary())

    def ask(self, *arguments: str) -> str:
        done = subprocess.run(
            ["unshare", "--mount", *self.command(*arguments)],
            capture_output=True,
            text=True,
            timeout=self.seconds,
            check=False,
        )
        if done.returncode:
            raise ClusterError(f"buildah {arguments[0]} failed: {done.stderr.strip()[-500:]}")
        return done.stdout

    def has(self, reference: str) -> bool:
        listed = json.loads(self.ask("images", "--json") or "null") or []
        return any(reference in (image.get("names") or []) for image in listed)

    def inspect(self, reference: str) -> dict[str, Any]:
        """Return an image's configuration: User, Env, Entrypoint, WorkingDir, and more."""
        found: dict[str, Any] = json.loads(self.ask("inspect", "--type", "image", reference))
        return dict(found["OCIv1"]["config"])

    def build(self, target: str, reference: str, arguments: Mapping[str, str]) -> None:
        """Build a target of the Dockerfile from our base image."""
        self._take_base()
        given = {"BASE_IMAGE": BASE, **arguments}
        words = [f"--build-arg={name}={value}" for name, value in given.items()]
        with pip_secrets() as secrets:
            self.do(
                "build", "--isolation", "chroot", "--network", "host", "--layers", "--quiet",
                "--target", target, "--tag", reference, *words, *secrets, str(REPOSITORY),
            )  # fmt: skip

    def _take_base(self) -> None:
        """Pull the current base image, which all stores share."""
        archive = ensure_base()
        stamp, taken = archive.with_suffix(".stamp").read_text(), self.folder / "base.stamp"
        if taken.exists() and taken.read_text() == stamp and self.has(BASE):
            return
        with step("base image into buildah"):
            self.do("pull", "--quiet", f"oci-archive:{archive}")
        taken.write_text(stamp)

    def _temporary(self) -> dict[str, str]:
        """Keep large temporary files next to the store: /tmp may be in memory."""
        folder = self.folder / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        return {**os.environ, "TMPDIR": str(folder)}


def ensure_base() -> Path:
    archive = cache() / "images-base/python.tar"
    stamp = hashlib.sha256(f"{SUITE} {PACKAGES} {PRUNED}".encode()).hexdigest()
    if is_current(archive, stamp):
        return archive
    preflight.program("debootstrap")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        root = Path(folder, "root")
        with step(f"base image ({SUITE})"):
            command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE]
            run([*command, str(root)], archive.with_suffix(".log"), 1800)
            for name in PRUNED:
                shutil.rmtree(root / name, ignore_errors=True)
                (root / name).mkdir()
            oci.write_archive(root, BASE, archive, ["python3"])
    stamp_file(archive).write_text(stamp)
    return archive


def stamp_file(archive: Path) -> Path:
    return archive.with_suffix(".stamp")


def is_current(archive: Path, stamp: str) -> bool:
    file = stamp_file(archive)
    return archive.exists() and file.exists() and file.read_text() == stamp


@contextmanager
def pip_secrets() -> Iterator[list[str]]:
    """Yield flags that give pip in the build this machine's index, proxy and authority."""
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
    if shutil.which("pip") is None:
        return {}
    command = ["pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return read_settings(done.stdout)


def read_settings(listed: str) -> dict[str, str]:
    """Return by option what `pip config list` prints; as in pip, the environment overrides files.

    Several values are one line, with blanks between them, as pip takes them, too.
    """
    lines = [line.partition("=") for line in listed.splitlines() if "=" in line]
    ranked = sorted(lines, key=lambda line: line[0].startswith(":env:"))
    values = {name.rpartition(".")[2]: ast.literal_eval(value) for name, _, value in ranked}
    return {name: " ".join(value.split()) for name, value in values.items()}


def run(
    command: Sequence[str], log: Path, seconds: float, env: Mapping[str, str] | None = None
) -> None:
    """Run a command; its output goes to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
            env=env,
        )
    if done.returncode:
        raise ClusterError(f"{Path(command[0]).name} failed, see {log}:\n{read_tail(log)}")
