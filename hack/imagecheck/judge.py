"""Judge the findings of a probe: each function returns problems with their fixes; no image is needed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from imagecheck import versions

USER = 65532
MOST_SHOWN = 6
ELSEWHERE: tuple[tuple[str, str, str], ...] = (
    ("*/libcufile_rdma.so.1", "*", "storage over RDMA: opened where a node has it"),
    ("*/nvshmem_bootstrap_*.so.3", "*", "torch starts NVSHMEM, not MPI, PMIx or OpenSHMEM"),
    ("*/nvshmem_transport_*.so.3", "*", "opened by NVSHMEM on the fabric whose libraries it wants"),
    ("*/numba/np/ufunc/tbbpool.*", "libtbb.so.*", "numba has another pool of threads"),
    ("*/torchcodec/libtorchcodec_*", "lib*", "video, for each FFmpeg that a user may add"),
    (
        "*/torch_memory_saver_hook_*",
        "libcudart.so.12",
        "for CUDA 12; `preload` shows the one in use",
    ),
)
"""Libraries that may lack something: file, what it lacks (patterns of fnmatch), why that is right."""


SHARED = frozenset({"build_backend.py"})
"""Files that several packages may bring: only a build of such a package reads them."""


def config(found: Mapping[str, Any]) -> list[str]:
    problems = []
    if found.get("User") != f"{USER}:{USER}":
        problems.append(f"User is {found.get('User')!r}: end its target with USER {USER}:{USER}")
    if found.get("Entrypoint") != ["rollout-worker"]:
        problems.append(f'Entrypoint is {found.get("Entrypoint")}: it has to be ["rollout-worker"]')
    return problems


def place(found: Mapping[str, Any]) -> list[str]:
    """Judge the process in which a command of the image runs, and its user."""
    problems = []
    if found["pid"] != 1:
        problems.append(
            f"the command is process {found['pid']}, not 1: the entry point may not be a shell"
        )
    if found["user"][:2] != [USER, USER]:
        problems.append(f"it runs as {found['user'][:2]}, not {USER}: see USER in the Dockerfile")
    if not found["user_name"]:
        problems.append("the user has no name, and libraries fail that ask: set USER and LOGNAME")
    if found["writable"] != ["/tmp", "/dev/shm"]:
        problems.append(f"it can write to {found['writable']}: only /tmp and /dev/shm are right")
    return problems


def agreement(found: Mapping[str, Any]) -> list[str]:
    wanted = versions.pins(found["requirements"])
    clashes = [
        f"{file} is installed by {' and by '.join(owners)}, and differs: pin versions that share no file "
        f"({versions.PINNED})"
        for file, *owners in found["shared_files"]
        if file not in SHARED
    ]
    return [
        *versions.differences(wanted, found["installed"]),
        *versions.disagreements(found["installed"]),
        *clashes,
    ]


def libraries(found: Mapping[str, Any]) -> list[str]:
    """Judge what shared libraries lack, except what another package ships: Python has loaded that by then."""
    wanted: dict[str, list[str]] = {}
    for file, names in sorted(found["missing"].items()):
        for name in names:
            if name not in found["shipped"] and not _known(file, name):
                wanted.setdefault(name, []).append(file)
    return [
        f"{name}, which {' and '.join(files[:2])} {'need' if len(files) > 1 else 'needs'}, is missing: add its "
        "package to the Dockerfile, or, if nobody loads that, say why in imagecheck/judge.py"
        for name, files in wanted.items()
    ]


def _known(file: str, name: str) -> bool:
    return any(fnmatch(file, path) and fnmatch(name, lacks) for path, lacks, _ in ELSEWHERE)


def imports(found: Mapping[str, Any]) -> list[str]:
    """Judge what the adapter could not import."""
    return [
        f"{name}: {why}; the requirements or the Dockerfile lack something"
        for name, why in sorted(found["failed"].items())
    ]


def kernel(found: Mapping[str, Any]) -> list[str]:
    if not found["target"].startswith("sm_90") or found["cubin"] < 1000 or not found["launcher"]:
        return [f"Triton made {found}: a cubin for sm_90 and a launcher were asked for"]
    return []


def rope(found: Mapping[str, Any]) -> list[str]:
    """Judge SGLang's kernel that nvcc compiled."""
    if found["functions"] != ["run_rope", "run_rope_store"]:
        return [
            f"the compiled module has {found['functions']}: run_rope and run_rope_store were asked for"
        ]
    return []


def preload(found: Mapping[str, Any]) -> list[str]:
    """Judge /bin/true with the memory saver's library preloaded; the loader only warns of some failures."""
    if found["status"] or found["said"]:
        return [
            f"{found['library']} preloaded into /bin/true: status {found['status']}, {found['said']!r}; "
            "list CUDA's folder in /etc/ld.so.conf.d (hack/image/install.sh)"
        ]
    return []


def nvcc(said: str, installed: Mapping[str, str]) -> list[str]:
    """Compare `nvcc --version` with torch's CUDA."""
    found = re.search(r"release (\d+\.\d+)", said)
    wanted = ".".join(installed.get("cuda-toolkit", "?").split(".")[:2])
    if not found or found[1] != wanted:
        return [
            f"nvcc is {found[1] if found else said!r}, torch's CUDA {wanted}: see {versions.PINNED}"
        ]
    return []


def summary(words: Sequence[str]) -> str:
    """Return problems as one line, the first ones in full."""
    rest = f"; and {len(words) - MOST_SHOWN} more" if len(words) > MOST_SHOWN else ""
    return "; ".join(words[:MOST_SHOWN]) + rest
