"""File systems that don't answer: whoever needs them is told in time, and the event loop goes on.

A named pipe that nobody writes is one: to read it takes for ever.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_common.wire.problems import ProblemError
from rollout_worker.openai.model_text import ModelText
from rollout_worker.ports.callers.auth import SEE_STATE, SharedToken
from rollout_worker.ports.data_routes import make_data_app
from rollout_worker.schemas import Checkpoint, DiscardRequest, StageRequest, WeightsSource
from rollout_worker.service import WorkerService
from rollout_worker.sources import tensor_filling
from rollout_worker.threads import SharedCall
from tests.support.unit.asgi import call
from tests.support.unit.tiny_worker import refused, settings, tiny_worker
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def _readers_end(tmp_path: Path) -> Iterator[None]:
    """Let readers go that a failed test has left: their threads would keep the process from ending."""
    yield
    for pipe in tmp_path.rglob("*"):
        if pipe.is_fifo():
            os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))


def answers(pipe: Path, text: str) -> None:
    """Let whoever reads the pipe have this; returns once it was read."""
    pipe.write_text(text)


async def test_a_folder_that_hangs_is_told(tmp_path: Path) -> None:
    pipe = tmp_path / "chat_template.jinja"
    os.mkfifo(pipe)
    before = set(threading.enumerate())
    texts = ModelText(lambda: tmp_path, seconds=0.05)
    for _ in range(3):
        with pytest.raises(ProblemError, match="did not answer in") as late:
            await texts.chat_template()
        assert late.value.problem.status == 504
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert names.count("template_0") == 1, "one hangs, not three"
    await asyncio.to_thread(answers, pipe, "{{ messages }}")
    await until(texts._reading._call.done, what="the template")  # type: ignore[union-attr]
    pipe.unlink()
    pipe.write_text("{{ messages }}")
    assert await texts.chat_template() == "{{ messages }}"


async def test_a_token_file_that_hangs_lets_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret")
    token = SharedToken(file, seconds=0.05)
    file.unlink()
    os.mkfifo(file)
    for _ in range(3):
        with refused("auth-unavailable"):
            await token.check_caller("Bearer s3cret", SEE_STATE)
    await asyncio.to_thread(answers, file, "other")


async def test_a_volume_that_hangs_is_told(tmp_path: Path) -> None:
    released = threading.Event()
    async with tiny_worker(tmp_path) as tiny:
        hanging = [tensor_filling._THREADS.submit(released.wait, 30) for _ in range(4)]
        with refused("deadline-exceeded"):
            await tiny.begin_stage(1, 7, deadline_seconds=0.05)
        assert tiny.updates.slot is None
        own = WeightsSource(checkpoint=Checkpoint())
        back = StageRequest(epoch=1, version=1, source=own, deadline_seconds=1)
        assert (await tiny.updates.stage_weights("me", back)).phase == "Staging", "the way out"
        await tiny.updates.discard_staged("me", DiscardRequest(epoch=1, version=1))
        released.set()
        assert all(each.result(30) for each in hanging)
        assert (await tiny.begin_stage(1, 7)).phase == "Staging"


async def test_facts_of_a_model_that_is_not_loaded_ask_no_hub() -> None:
    app = make_data_app(WorkerService(settings("--model", "org/model-of-a-silent-hub")))
    for path in ("/v1/info", "/v1/completions", "/v1/chat/completions"):
        method = "GET" if path == "/v1/info" else "POST"
        answer = await asyncio.wait_for(call(app, path, b"{}", method), 5)
        assert (answer.status, answer.slug) == (503, "starting")


async def test_who_asks_at_once_shares_the_work() -> None:
    begun: list[int] = []
    go = threading.Event()

    def work() -> int:
        begun.append(1)
        go.wait(30)
        return len(begun)

    shared = SharedCall(work, "shared")
    asked = [asyncio.create_task(shared.get_result(30)) for _ in range(20)]
    await until(lambda: begun, what="the work")
    asked[0].cancel()
    go.set()
    assert await asyncio.gather(*asked[1:]) == [1] * 19
    assert await shared.get_result(30) == 2
