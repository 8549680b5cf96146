"""Compile `common/transfer/delta.c` for a wheel, or next to its source for an editable install.

hatchling runs it in the build environment. Neither the build nor the installation of a wheel needs a compiler:
the PyPI package `ziglang` contains one, which links for an old glibc. Without it, the system's `cc` is used;
without that, or on an untested platform, the wheel has Python only, and numpy does the work of the library.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "common/transfer/delta.c"
LIBRARY = "libdelta.so"
GLIBC = (2, 17)
"""The glibc that zig links for: libraries tagged `manylinux_2_17` may require nothing newer."""
MACHINES = ("x86_64", "aarch64")
SECONDS = 300
_FLAGS = ("-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-s")


class NativeHook(BuildHookInterface):  # type: ignore[misc]
    """hatchling calls `initialize` before it builds and `finalize` after."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library and add it to the wheel, which is then for this platform only."""
        root = Path(self.root)
        self._folder = tempfile.mkdtemp(prefix="rollout-")
        library = Path(self._folder, LIBRARY)
        try:
            tag = compiled(root / SOURCE, library)
            if version == "editable":
                return place(library, root / Path(SOURCE).with_name(LIBRARY))
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(
                f"{SOURCE} is left out, and numpy does its work: {reason(error)}"
            )
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
        build_data["force_include"][str(library)] = f"rollout_common/transfer/{LIBRARY}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def compiled(source: Path, library: Path) -> str:
    """Compile for this machine; returns the platform's tag of a wheel with the library.

    Raises:
        OSError, subprocess.SubprocessError: No compiler was found, or each failed.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        raise OSError(f"it is not tested on {sys.platform} {machine}")
    errors = []
    for compiler, tag in compilers(machine):
        try:
            run([*compiler, *_FLAGS, "-o", str(library), str(source)], library.parent)
        except (OSError, subprocess.SubprocessError) as error:
            errors.append(reason(error))
        else:
            return tag
    raise OSError("; ".join(errors))


def compilers(machine: str) -> list[tuple[list[str], str]]:
    """Return compiler commands, the best first, each with the platform tag of its output."""
    found = [(["cc"], f"linux_{machine}")]
    if importlib.util.find_spec("ziglang") is not None:
        target = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
        command = [sys.executable, "-m", "ziglang", "cc", "-target", target]
        # Most wheels are installed where they are built, and musl accepts no manylinux tag.
        glibc = platform.libc_ver()[0] == "glibc"
        tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}" if glibc else f"linux_{machine}"
        found.insert(0, (command, tag))
    return found


def run(command: list[str], folder: Path) -> None:
    caches = {f"ZIG_{which}_CACHE_DIR": str(folder / "zig") for which in ("LOCAL", "GLOBAL")}
    subprocess.run(
        command,
        env={**os.environ, **caches},
        check=True,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def reason(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return str(said or error).strip()[-2000:]


def place(library: Path, to: Path) -> None:
    """Replace a file in one step: a process that has the old one open keeps it."""
    partial = to.with_name(f".{to.name}.{os.getpid()}")
    shutil.copy2(library, partial)
    partial.replace(to)
