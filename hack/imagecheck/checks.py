"""The checks of one image, in order: each runs something in the box; what that means is judged without an image."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from imagecheck import versions
from imagecheck.box import SHARED, Box, Ended

DRIVER = f"{SHARED}/driver"
"""Where the probe of libraries leaves the stub of the driver."""

MARK = "found: "
USER = 65532
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
SHARED_FILES = frozenset({"build_backend.py"})
"""Files that several packages may bring: only a build of such a package reads them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one check: what was seen, and what is wrong with it."""

    seen: str
    problems: list[str]


class Failed(Exception):
    """A command in the image did not end as it should; the text says how it ended."""


def engine_of(requirements: str) -> str:
    """Return the engine of an image with these requirements, "" for none."""
    for name in ("vllm", "sglang"):
        if f"\n{name}==" in requirements:
            return name
    return "hf" if "\ntorch==" in requirements else ""


def right_engine(found: str, wanted: str | None) -> Verdict:
    """Judge which engine an image holds; `wanted`: which one it should, None if that isn't known."""
    holds = found or "none"
    if wanted in (None, found):
        return Verdict(holds, [])
    problem = f"it should hold {wanted}, it holds {holds}: its target in the Dockerfile has other requirements"
    return Verdict(holds, [problem])


def checks(box: Box, wanted: str | None = None) -> Iterator[tuple[str, Callable[[], Verdict]]]:
    """Yield name and check; what they ask first decides which ones there are.

    `wanted`: the engine that the image should hold.
    """
    yield "configuration", lambda: Verdict(_config_words(box), config_problems(box.config))
    found: dict[str, Any] = {}
    yield "process", lambda: _place(box, found)
    if not found:
        return
    engine = engine_of(found["requirements"])
    yield "engine", lambda: right_engine(engine, wanted)
    yield "versions", lambda: Verdict(_versions_words(found), agreement_problems(found))
    yield "help", lambda: _help(box)
    if not engine:
        return
    yield "libraries", lambda: _libraries(box)
    yield "imports", lambda: _imports(box, engine)
    yield "triton", lambda: _kernel(box)
    if engine != "hf":
        yield "nvcc", lambda: _nvcc(box, found)
    if engine == "sglang":
        yield "rope", lambda: _rope(box)
        yield "preload", lambda: _preload(box)
    if engine == "hf":
        yield "serving", lambda: _serving(box)


def findings(ended: Ended) -> Any:
    """Return what a probe found.

    Raises:
        Failed: it ended without telling.
    """
    for line in reversed(ended.output.splitlines()):
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    how = "ran too long" if ended.status is None else f"exit status {ended.status}"
    raise Failed(f"{how}: {ended.last()}")


def _place(box: Box, found: dict[str, Any]) -> Verdict:
    found.update(findings(box.probe("place", seconds=300)))
    seen = f"PID {found['pid']}, user {found['user'][0]}, writes to {' and '.join(found['writable'])} only"
    return Verdict(f"{seen}, Python {found['python']}", place_problems(found))


def _help(box: Box) -> Verdict:
    ended = box.run([*box.config["Entrypoint"], "--help"], seconds=300)
    if ended.status != 0 or "serve" not in ended.output:
        return Verdict(
            "", [f"status {ended.status}: {ended.last()}; the worker itself does not start"]
        )
    return Verdict(f"{' '.join(box.config['Entrypoint'])} --help", [])


def _libraries(box: Box) -> Verdict:
    found = findings(box.probe("libraries", seconds=1200))
    seen = f"{found['libraries']} shared libraries, {found['driver']} of them need the driver"
    return Verdict(seen, library_problems(found))


def _imports(box: Box, engine: str) -> Verdict:
    found = findings(box.probe("imports", engine, seconds=1800, LD_LIBRARY_PATH=DRIVER))
    seen = f"{found['imports']} imports, of {len(found['packages'])} packages"
    problems = [
        f"{name}: {why}; the requirements or the Dockerfile lack something"
        for name, why in sorted(found["failed"].items())
    ]
    return Verdict(seen, problems)


def _kernel(box: Box) -> Verdict:
    found = findings(box.probe("kernel", seconds=600, LD_LIBRARY_PATH=DRIVER))
    seen = f"{found['target']}, {found['cubin']} bytes of code by Triton {found['triton']}, launcher built"
    return Verdict(seen, kernel_problems(found))


def _nvcc(box: Box, found: dict[str, Any]) -> Verdict:
    said = box.run(["/usr/local/cuda/bin/nvcc", "--version"], seconds=60).output
    return Verdict(said.strip().splitlines()[-1], nvcc_problems(said, found["installed"]))


def _rope(box: Box) -> Verdict:
    found = findings(box.probe("rope", seconds=1800, LD_LIBRARY_PATH=DRIVER))
    made = ", ".join(found["functions"])
    seen = f"rotary embedding for sm_90a compiled, linked and loaded: {made}"
    right = found["functions"] == ["run_rope", "run_rope_store"]
    problem = f"the compiled module has {made}: run_rope and run_rope_store were asked for"
    return Verdict(seen, [] if right else [problem])


def _preload(box: Box) -> Verdict:
    found = findings(box.probe("preload", seconds=300, LD_LIBRARY_PATH=DRIVER))
    return Verdict(found["library"].rpartition("/")[2], preload_problems(found))


def _serving(box: Box) -> Verdict:
    made = box.run(
        ["python3", f"{SHARED}/tinymodel.py", f"{SHARED}/model", "--seed", "1"], seconds=300
    )
    if made.status != 0:
        raise Failed(f"no tiny model: {made.last()}")
    flags = f"--model {SHARED}/model --device cpu --auth none --control-host 127.0.0.1 --log-format text"
    ended = box.run(
        [*box.config["Entrypoint"], "serve", *flags.split()],
        seconds=600,
        variables={"OMP_NUM_THREADS": "1"},
        alongside=f"python3 {SHARED}/client.py",
    )
    answer = box.shared / "answer.json"
    if ended.status != 0 or not answer.exists():
        raise Failed(f"the worker ended with {ended.status}: {ended.last()}")
    tokens = json.loads(answer.read_text())["outputs"][0]["token_ids"]
    problems = [] if len(tokens) == 8 else [f"8 tokens asked for, got {tokens}"]
    return Verdict(f"a tiny model on the CPU: {tokens}, ended by SIGTERM", problems)


def _config_words(box: Box) -> str:
    return f"User {box.config.get('User')}, Entrypoint {box.config.get('Entrypoint')}"


def _versions_words(found: dict[str, Any]) -> str:
    installed = found["installed"]
    words = [
        f"{name} {installed[name]}"
        for name in ("torch", "cuda-toolkit", "triton")
        if name in installed
    ]
    return ", ".join([f"{len(installed)} packages", *words])


def config_problems(found: Mapping[str, Any]) -> list[str]:
    problems = []
    if found.get("User") != f"{USER}:{USER}":
        problems.append(f"User is {found.get('User')!r}: end its target with USER {USER}:{USER}")
    if found.get("Entrypoint") != ["rollout-worker"]:
        problems.append(f'Entrypoint is {found.get("Entrypoint")}: it has to be ["rollout-worker"]')
    return problems


def place_problems(found: Mapping[str, Any]) -> list[str]:
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


def agreement_problems(found: Mapping[str, Any]) -> list[str]:
    wanted = versions.pins(found["requirements"])
    clashes = [
        f"{file} is installed by {' and by '.join(owners)}, and differs: pin versions that share no file "
        f"({versions.PINNED})"
        for file, *owners in found["shared_files"]
        if file not in SHARED_FILES
    ]
    return [
        *versions.differences(wanted, found["installed"]),
        *versions.disagreements(found["installed"]),
        *clashes,
    ]


def library_problems(found: Mapping[str, Any]) -> list[str]:
    """Judge what shared libraries lack, except what another package ships: Python has loaded that by then."""
    wanted: dict[str, list[str]] = {}
    for file, names in sorted(found["missing"].items()):
        for name in names:
            if name not in found["shipped"] and not _known(file, name):
                wanted.setdefault(name, []).append(file)
    return [
        f"{name}, which {' and '.join(files[:2])} {'need' if len(files) > 1 else 'needs'}, is missing: add its "
        "package to the Dockerfile, or, if nobody loads that, say why in imagecheck/checks.py"
        for name, files in wanted.items()
    ]


def _known(file: str, name: str) -> bool:
    return any(fnmatch(file, path) and fnmatch(name, lacks) for path, lacks, _ in ELSEWHERE)


def kernel_problems(found: Mapping[str, Any]) -> list[str]:
    if not found["target"].startswith("sm_90") or found["cubin"] < 1000 or not found["launcher"]:
        return [f"Triton made {found}: a cubin for sm_90 and a launcher were asked for"]
    return []


def preload_problems(found: Mapping[str, Any]) -> list[str]:
    """Judge /bin/true with the memory saver's library preloaded; the loader only warns of some failures."""
    if found["status"] or found["said"]:
        return [
            f"{found['library']} preloaded into /bin/true: status {found['status']}, {found['said']!r}; "
            "list CUDA's folder in /etc/ld.so.conf.d (hack/image/install.sh)"
        ]
    return []


def nvcc_problems(said: str, installed: Mapping[str, str]) -> list[str]:
    """Compare `nvcc --version` with torch's CUDA."""
    found = re.search(r"release (\d+\.\d+)", said)
    wanted = ".".join(installed.get("cuda-toolkit", "?").split(".")[:2])
    if not found or found[1] != wanted:
        return [
            f"nvcc is {found[1] if found else said!r}, torch's CUDA {wanted}: see {versions.PINNED}"
        ]
    return []
