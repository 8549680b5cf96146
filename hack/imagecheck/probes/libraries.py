"""What each shared library needs and does not find, and a driver that has no device.

The driver's libraries come from the node. A stub with every function that somebody in the image
wants of them, each answering "no device", stands in: with it everything else must load.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from told import tell

ROOT = Path("/opt/rollout")
STUBS = Path("/tmp/check/driver")
DRIVER = {"libcuda.so.1": r"cu[A-Z]\w+", "libnvidia-ml.so.1": r"nvml\w+"}
LOADER = "/lib64/ld-linux-x86-64.so.2"
NO_DEVICE = 100


def libraries() -> Iterator[Path]:
    """Every ELF file that is a library, under whatever name it comes."""
    for path in sorted(ROOT.rglob("*.so*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def missing(path: Path) -> list[str]:
    """Return what the loader does not find for a library."""
    folders = f"{STUBS}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    # As ldd asks: with this variable the loader lists what it lacks, and goes on.
    environ = {**os.environ, "LD_LIBRARY_PATH": folders, "LD_TRACE_LOADED_OBJECTS": "1"}
    done = subprocess.run(
        [LOADER, str(path)], capture_output=True, text=True, env=environ, check=False
    )
    found = re.findall(r"^\s*(\S+) => not found", done.stdout, re.M)
    # What the loader itself refuses (another machine's library, a version that is not there).
    errors = re.findall(
        r"^(?:.*: )?(version `.*' not found.*|.*cannot open .*)$", done.stderr, re.M
    )
    return [*found, *errors]


def wanted(paths: Iterable[Path], pattern: str) -> list[str]:
    """Return the functions of a library of the driver that any of these libraries wants."""
    names: set[str] = set()
    for path in paths:
        done = subprocess.run(
            ["nm", "-D", "--undefined-only", str(path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        names.update(re.findall(rf"\b[Uw] ({pattern})$", done.stdout, re.M))
    return sorted(names)


def in_headers(pattern: str) -> list[str]:
    """Return the functions that compilers know from headers: what is compiled later wants them."""
    names: set[str] = set()
    for header in (*ROOT.rglob("cuda.h"), *ROOT.rglob("nvml.h")):
        names.update(re.findall(rf"\b({pattern})\b", header.read_text(errors="replace")))
    return sorted(names)


def stub(soname: str, functions: Iterable[str]) -> None:
    """Compile a library with these functions, with the image's own compiler."""
    source = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in functions)
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-x", "c", "-"]
    subprocess.run([*command, "-o", str(STUBS / soname)], input=source, text=True, check=True)


def main() -> None:
    STUBS.mkdir(exist_ok=True)
    all_of_them = list(libraries())
    with ThreadPoolExecutor(4) as pool:
        lacking = dict(zip(all_of_them, pool.map(missing, all_of_them), strict=True))
        for soname, pattern in DRIVER.items():
            needy = [path for path, names in lacking.items() if soname in names]
            stub(soname, {*wanted(needy, pattern), *in_headers(pattern)})
        again = [path for path, names in lacking.items() if DRIVER.keys() & set(names)]
        lacking.update(zip(again, pool.map(missing, again), strict=True))
    tell(
        {
            "libraries": len(all_of_them),
            "driver": len(again),
            "shipped": sorted({path.name for path in all_of_them}),
            "missing": {
                str(path.relative_to(ROOT)): names for path, names in lacking.items() if names
            },
        }
    )


if __name__ == "__main__":
    main()
