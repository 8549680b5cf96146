"""The checks of one image, in order: each runs something in the box and lets `judge` say what it means."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from imagecheck import judge
from imagecheck.box import SHARED, Box, Ended

DRIVER = f"{SHARED}/driver"
"""Where the probe of libraries leaves the stub of the driver."""

MARK = "found: "


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
    yield "configuration", lambda: Verdict(_config_words(box), judge.config(box.config))
    found: dict[str, Any] = {}
    yield "process", lambda: _place(box, found)
    if not found:
        return
    engine = engine_of(found["requirements"])
    yield "engine", lambda: right_engine(engine, wanted)
    yield "versions", lambda: Verdict(_versions_words(found), judge.agreement(found))
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
    return Verdict(f"{seen}, Python {found['python']}", judge.place(found))


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
    return Verdict(seen, judge.libraries(found))


def _imports(box: Box, engine: str) -> Verdict:
    found = findings(box.probe("imports", engine, seconds=1800, LD_LIBRARY_PATH=DRIVER))
    seen = f"{found['imports']} imports, of {len(found['packages'])} packages"
    return Verdict(seen, judge.imports(found))


def _kernel(box: Box) -> Verdict:
    found = findings(box.probe("kernel", seconds=600, LD_LIBRARY_PATH=DRIVER))
    seen = f"{found['target']}, {found['cubin']} bytes of code by Triton {found['triton']}, launcher built"
    return Verdict(seen, judge.kernel(found))


def _nvcc(box: Box, found: dict[str, Any]) -> Verdict:
    said = box.run(["/usr/local/cuda/bin/nvcc", "--version"], seconds=60).output
    return Verdict(said.strip().splitlines()[-1], judge.nvcc(said, found["installed"]))


def _rope(box: Box) -> Verdict:
    found = findings(box.probe("rope", seconds=1800, LD_LIBRARY_PATH=DRIVER))
    seen = (
        f"rotary embedding for sm_90a compiled, linked and loaded: {', '.join(found['functions'])}"
    )
    return Verdict(seen, judge.rope(found))


def _preload(box: Box) -> Verdict:
    found = findings(box.probe("preload", seconds=300, LD_LIBRARY_PATH=DRIVER))
    return Verdict(found["library"].rpartition("/")[2], judge.preload(found))


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
