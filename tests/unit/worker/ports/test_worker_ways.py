"""The ways of a request and of an update, as docs/architecture-worker.md describes them: both are walked here.

A trace notes every module of the product that is entered between a call and its answer, over real sockets.
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

from rollout_client import AsyncRolloutPool
from tests.support.unit.served import Served, served

ROOT = Path(__file__).resolve().parents[4]
PRODUCT = ("worker", "client", "common")
PAGE = ROOT / "docs" / "architecture-worker.md"
MOST_PUBLISH_FILES = 46
"""43 at once; on a busy machine what waits and asks again is passed, too."""
TIMERS = {
    "worker/lifecycle/supervisor",
    *("client/routing/health_checker", "client/routing/member_records"),
}
"""Loops that the clock wakes, whether or not anything is asked of a worker."""


def described_way(title: str) -> set[str]:
    """The files in the table of a section."""
    section = PAGE.read_text().split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]
    return set(re.findall(r"^\| `([a-z_/]+)\.py` \|", section, re.MULTILINE))


class Trace:
    """The modules of the product in which a function was called, in any thread."""

    def __init__(self) -> None:
        self.modules: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call; the interpreter calls this as its profiler."""
        if event == "call" and (module := _product_module(frame.f_code.co_filename)):
            self.modules.add(module)


@cache
def _product_module(name: str) -> str | None:
    file = Path(name).resolve()
    if not file.is_relative_to(ROOT):
        return None
    module = file.relative_to(ROOT).with_suffix("").as_posix()
    return module if module.startswith(PRODUCT) and module not in TIMERS else None


@pytest.fixture
def trace() -> Iterator[Trace]:
    """Trace from before the worker starts: a thread that runs already would not be seen."""
    found = Trace()
    threading.setprofile(found)
    sys.setprofile(found)
    yield found
    sys.setprofile(None)
    threading.setprofile(None)


@pytest.fixture
async def worker(tmp_path: Path, trace: Trace) -> AsyncIterator[Served]:
    (tmp_path / "token").write_text("secret")
    auth = ("--auth", "token", "--auth-token-file", str(tmp_path / "token"))
    async with served(tmp_path, *auth) as worker:
        yield worker


async def test_a_generate_request_passes_exactly_the_files_of_its_table(
    worker: Served, trace: Trace
) -> None:
    worker.tiny.engine.free = True
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{worker.data}", trust_env=False
    ) as data:
        assert (await data.get("/health")).status_code == 200
        trace.modules.clear()
        body = {"token_ids": [5, 6], "sampling": {"max_tokens": 3}}
        answer = await data.post("/v1/generate", json=body)
        passed = set(trace.modules)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["outputs"][0]["token_ids"]) == 3
    assert passed == described_way("The way of a generate request")


async def test_a_publish_of_files_passes_the_files_of_its_table_and_few_more(
    worker: Served, trace: Trace
) -> None:
    """On both sides: the trainer's client and the worker."""
    tiny = worker.tiny
    folder = str(tiny.weights(7))
    data, control = (f"http://127.0.0.1:{port}" for port in (worker.data, worker.control))
    async with AsyncRolloutPool.from_urls([data], control_urls=[control]) as pool:
        await pool.acquire()
        trace.modules.clear()
        await pool.publish_weights(1, folder)
        passed = set(trace.modules)
    assert tiny.active is not None
    assert tiny.active.version == 1
    assert described_way("The way of a publish of files") <= passed
    assert len(passed) <= MOST_PUBLISH_FILES, " ".join(sorted(passed))
