"""The ways of a request and of an update, as docs/architecture.md tells them: both are walked here.

A trace notes every module of the worker that is entered between the call and its answer.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

import rollout_worker
from rollout_worker.ports.auth import AllowAnyone
from rollout_worker.ports.control_routes import make_control_app
from rollout_worker.ports.data_routes import make_data_app
from tests.support.unit.tiny_worker import TinyWorker, tiny_worker

HOME = Path(rollout_worker.__file__).resolve().parent
PAGE = Path(__file__).parents[4] / "docs" / "architecture.md"
MOST_FILES = 8
EVERYWHERE = {"core", "observe", "wire", "schemas", "engine", "settings", "threads", "lifecycle"}
"""What every part asks, and the worker's own loops, which look up at every change: no steps."""
AT_THE_DOOR = {
    "ports/port_app",
    "ports/access_rights",
    "ports/auth",
    "ports/browser_guard",
    "requests/body_routes",
}
"""What every call passes on its port: the body's limits, the caller's name and right."""

IN_THE_ANSWER = {"service", "requests/admission_checks", "updates/pushed_weights"}
"""What tells the worker's state, which a commit answers with: no steps of an update."""


def told(title: str) -> list[str]:
    """The files of a way, in order; the engine's adapter is told beside them."""
    section = PAGE.read_text().split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `([a-z_/]+)\.py` \|", section, re.MULTILINE)


class Trace:
    """The modules of the worker in which a function was called, in whatever thread."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call; what the interpreter asks of a profiler."""
        if event == "call" and (module := _module(frame.f_code.co_filename)):
            self.modules.add(module)


@cache
def _module(name: str) -> str | None:
    file = Path(name).resolve()
    return file.relative_to(HOME).with_suffix("").as_posix() if HOME in file.parents else None


@pytest.fixture
def trace() -> Iterator[Trace]:
    """Trace from before the worker starts: a thread that runs already would not be seen."""
    found = Trace()
    threading.setprofile(found)
    sys.setprofile(found)
    yield found
    sys.setprofile(None)
    threading.setprofile(None)


def steps(modules: set[str]) -> set[str]:
    """Those of the modules that are steps of a way."""
    return {m for m in modules - AT_THE_DOOR if m.partition("/")[0] not in EVERYWHERE}


@pytest.fixture
async def tiny(tmp_path: Path, trace: Trace) -> AsyncIterator[TinyWorker]:
    async with tiny_worker(tmp_path) as worker:
        yield worker


@pytest.fixture
async def ports(tiny: TinyWorker) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Clients of the data and the control port, without sockets."""
    apps = make_data_app(tiny.worker), make_control_app(tiny.worker, AllowAnyone())
    data, control = (
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1")
        for app in apps
    )
    async with data, control:
        yield data, control


async def test_a_generate_request_passes_the_files_that_are_told(
    tiny: TinyWorker, ports: tuple[httpx.AsyncClient, httpx.AsyncClient], trace: Trace
) -> None:
    data, _ = ports
    tiny.engine.free = True
    trace.modules.clear()
    answer = await data.post(
        "/v1/generate", json={"token_ids": [5, 6], "sampling": {"max_tokens": 3}}
    )
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["outputs"][0]["token_ids"]) == 3
    way = told("The way of a generate request")
    assert steps(trace.modules) == set(way)
    assert len(way) <= MOST_FILES


async def test_an_update_of_weights_passes_the_files_that_are_told(
    tiny: TinyWorker, ports: tuple[httpx.AsyncClient, httpx.AsyncClient], trace: Trace
) -> None:
    _, control = ports
    source = {"path": str(tiny.weights(7))}
    identity = {"epoch": 1, "version": 1}
    trace.modules.clear()
    staged = await control.post("/v1/weights/stage", json={**identity, "source": source})
    assert staged.status_code == 202, staged.text
    slot = tiny.updates.slot
    assert slot is not None
    assert slot.task is not None
    await slot.task
    done = await control.post("/v1/weights/commit", json=identity)
    assert done.status_code == 200, done.text
    assert done.json()["active"]["version"] == 1
    way = told("The way of a weights update")
    assert steps(trace.modules) - IN_THE_ANSWER == set(way)
    assert len(way) <= MOST_FILES
