"""Pictures through the client: the page's code, and requests that go on at another real worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_client import AsyncRolloutPool, RolloutPool
from rollout_worker.pictures.picture_decoding import decode_picture
from tests.support.doc_manifests import run_code
from tests.support.engine.picture_models import PictureModels, encoded
from tests.support.engine.workers import InProcess, several_in_process
from tests.support.waiting import until

ONE, OTHER = encoded(1), encoded(3)
"""Of one size: they fit the same prompt."""
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> PictureModels:
    return PictureModels(tmp_path_factory.mktemp("vision"), "qwen2_vl")


@pytest.fixture(scope="module")
def workers(models: PictureModels) -> Iterator[list[InProcess]]:
    with several_in_process(models.model(1)) as workers:
        yield workers


def kept(worker: InProcess) -> set[str]:
    """Hashes of the pictures that a worker keeps."""
    return worker.call(lambda: set(worker.worker._preparation._pictures.store._kept))


def test_the_code_of_the_page_runs(
    workers: list[InProcess],
    models: PictureModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    urls = [worker.url for worker in workers]
    monkeypatch.setattr(RolloutPool, "from_cluster", lambda *_: RolloutPool.from_urls(urls))
    file, other = tmp_path / "one.png", tmp_path / "other.png"
    file.write_bytes(ONE)
    other.write_bytes(OTHER)
    prompt = list(models.judge(1).prompt([decode_picture(ONE)]))
    names: dict[str, Any] = {"FILE": file, "OTHER": other, "PROMPT_IDS": prompt}
    try:
        run_code("pictures.md", names)
    finally:
        names["pool"].close()
    assert len(names["result"].outputs) == 4


async def test_an_output_goes_on_at_another_worker_with_its_picture(
    workers: list[InProcess], models: PictureModels
) -> None:
    """The first worker falls asleep in the middle; the other has not seen the picture."""
    judge = models.judge(1)
    fresh = encoded(21)
    prompt = judge.prompt([decode_picture(fresh)])
    expected, _ = judge.generate(prompt, [decode_picture(fresh)], 400)
    async with AsyncRolloutPool.from_urls([worker.url for worker in workers]) as pool:
        await pool.wait_serving(2)
        stream = pool.stream(prompt, images=[fresh], sampling={**GREEDY, "max_tokens": 400})
        async with stream:
            task = asyncio.create_task(_read(stream))
            await until(lambda: len(stream.result.token_ids) > 20, what="tokens")
            busy = next(i for i, worker in enumerate(workers) if worker.state()["in_flight"])
            await asyncio.to_thread(workers[busy].post, "sleep", mode="abort")
            try:
                await asyncio.wait_for(task, 60)
            finally:
                await asyncio.to_thread(workers[busy].post, "wake")
        result = stream.result
    assert list(result.token_ids) == expected
    assert len({each.replica for each in result.attempts}) == 2
    picture = decode_picture(fresh).ref
    assert all(picture in kept(worker) for worker in workers)


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass
