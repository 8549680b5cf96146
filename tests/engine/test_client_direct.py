"""A pool without an operator: weights and sleep over the control ports of real workers."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_client import (
    AsyncRolloutPool,
    DirectOptions,
    NoReplica,
    PublishFailed,
    PublishProgress,
    RolloutPool,
    SteeringFailed,
)
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, InProcess, ports_of, several_in_process
from tests.support.waiting import until

GREEDY = {"temperature": 0, "ignore_eos": True}
TOKEN = "secret-of-the-tests"
VERSIONS = itertools.count(1)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(TOKEN)
    return ["--auth", "token", "--auth-token-file", str(file)]


@pytest.fixture(scope="module")
def workers(tiny_models: TinyModels, flags: list[str]) -> Iterator[list[InProcess]]:
    with several_in_process(tiny_models.model(1), *flags, token=TOKEN) as workers:
        yield workers


def new_pool(workers: list[InProcess]) -> AsyncRolloutPool:
    direct = DirectOptions(token=lambda: TOKEN, in_flight="Abort")
    return AsyncRolloutPool.from_urls(**ports_of(workers), direct=direct)


def blocking_pool(workers: list[InProcess], **options: Any) -> RolloutPool:
    return RolloutPool.from_urls(**ports_of(workers), direct=DirectOptions(token=TOKEN), **options)


@pytest.fixture
async def pool(workers: list[InProcess]) -> AsyncIterator[AsyncRolloutPool]:
    async with new_pool(workers) as pool:
        yield pool


def active(worker: InProcess) -> tuple[int, int]:
    weights = worker.state()["weights"]["active"]
    return (weights["epoch"], weights["version"])


async def test_weights_come_to_all_while_requests_run(
    pool: AsyncRolloutPool, workers: list[InProcess], tiny_models: TinyModels
) -> None:
    told: list[PublishProgress] = []
    prompts = [[*PROMPT, i] for i in range(12)]
    epoch = await pool.acquire()
    batch = asyncio.create_task(
        pool.generate_many(prompts, sampling={**GREEDY, "max_tokens": 150}, concurrency=4)
    )
    await until(lambda: any(w.state()["in_flight"] for w in workers), what="requests to run")
    version = next(VERSIONS)
    done = await pool.publish_weights(version, str(tiny_models.weights(2)), progress=told.append)
    assert done.identity.as_tuple() == (epoch, version)
    assert done.replicas == 2
    assert done.root_hash is not None
    assert done.root_hash.startswith("xxh3")
    assert done.pause_seconds is not None
    assert [active(w) for w in workers] == [(epoch, version)] * 2
    assert list(dict.fromkeys(t.phase for t in told)) == ["Staging", "Committing", "Complete"]
    assert (told[-1].done, told[-1].total) == (2, 2)
    results = await batch
    assert all(len(result.token_ids) == 150 for result in results)
    spanning = [r for r in results if len(r.output.weights) == 2]
    assert spanning, "somebody ran through the commit"
    assert {r.output.weights[-1].version for r in results} == {version}


async def test_pause_and_generating(pool: AsyncRolloutPool, workers: list[InProcess]) -> None:
    await pool.pause()
    assert [w.state()["lifecycle"] for w in workers] == ["Paused"] * 2
    async with pool.generating():
        await pool.generate(PROMPT, sampling={"max_tokens": 2})
    assert [w.state()["lifecycle"] for w in workers] == ["Asleep"] * 2
    with pytest.raises(ZeroDivisionError):
        async with pool.generating():
            _ = 1 // 0
    assert [w.state()["lifecycle"] for w in workers] == ["Asleep"] * 2
    await pool.wake()
    assert all(w.ready() for w in workers)


async def test_a_publish_cancelled_at_its_commit_goes_on_to_its_end(
    pool: AsyncRolloutPool, workers: list[InProcess], tiny_models: TinyModels
) -> None:
    await pool.acquire()
    version = next(VERSIONS)

    def leave(progress: PublishProgress) -> None:
        if progress.phase == "Committing":
            publish.cancel()

    # A Path serves as well as text.
    publish = asyncio.create_task(
        pool.publish_weights(version, tiny_models.weights(2), progress=leave)
    )
    with pytest.raises(asyncio.CancelledError):
        await publish
    await until(lambda: {active(w)[1] for w in workers} == {version}, 30, what="the weights")


@pytest.mark.parametrize(
    "wrong", [{"in_flight": "Never"}, {"drain_seconds": -1}, {"sleep_level": 3}], ids=str
)
def test_options_that_no_worker_takes_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"in_flight|deadline_seconds|level"):
        DirectOptions(**wrong)


def test_who_may_not_steer_is_told_so(workers: list[InProcess]) -> None:
    places, wrong = ports_of(workers), DirectOptions(token="wrong")
    with RolloutPool.from_urls(**places, direct=wrong) as pool:
        with pytest.raises(SteeringFailed, match="token"):
            pool.acquire()
        assert pool.epoch is None
    with (
        RolloutPool.from_urls(places["urls"]) as pool,
        pytest.raises(SteeringFailed, match="give control_urls"),
    ):
        pool.publish_weights(1, "x")


def test_the_synchronous_pool_steers_too(workers: list[InProcess], tiny_models: TinyModels) -> None:
    with blocking_pool(workers, max_staleness=1) as pool:
        version = next(VERSIONS)
        done = pool.publish_weights(version, str(tiny_models.weights(3)))
        assert done.identity.epoch == pool.epoch
        assert pool.floor is not None
        assert pool.floor.version == version - 1
        with pool.generating():
            result = pool.generate(PROMPT, sampling={"max_tokens": 2})
        assert result.output.weights[0].version == version
        pool.wake()
        assert all(w.ready() for w in workers)


async def test_who_wakes_the_pool_gets_all_of_it(workers: list[InProcess]) -> None:
    """Replicas that refused a request while asleep are not left out until some probe comes by."""
    async with new_pool(workers) as pool:
        await pool.wait_serving(2, seconds=10)
        for _ in range(2):
            await pool.sleep()
            with pytest.raises(NoReplica):
                await pool.generate(PROMPT, deadline_seconds=0.5)
            assert pool.serving() == []
            await pool.wake()
            assert len(pool.serving()) == 2


# Versions that are written, published and pruned in one call.


def saved(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_one_call_writes_publishes_and_prunes(
    workers: list[InProcess], tiny_models: TinyModels, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    tensors = load_file(tiny_models.weights(2) / "model.safetensors")
    async with new_pool(workers) as pool:
        epoch = await pool.acquire()
        for version in (1, 2, 3):
            done = await pool.save_and_publish(tensors, version, folder, keep=2)
            assert done.identity.as_tuple() == (epoch, version)
            manifest = json.loads(
                (folder / f"epoch-{epoch}-version-{version}/manifest.json").read_text()
            )
            assert done.root_hash == manifest["root_hash"]
        kept = {f"epoch-{epoch}-version-{version}" for version in (2, 3)}
        assert saved(folder) == kept
        # What no worker can use is not committed, and costs no version that serves.
        wrong = {**tensors, "model.norm.weight": torch.zeros(7)}
        with pytest.raises(PublishFailed, match=r"model\.norm\.weight"):
            await pool.save_and_publish(wrong, 4, folder)
        assert saved(folder) == kept | {f"epoch-{epoch}-version-4"}
        with pytest.raises(FileExistsError):
            await pool.save_and_publish(tensors, 4, folder)
        result = await pool.generate(PROMPT, sampling={"max_tokens": 2})
        assert result.output.weights[0].version == 3
        await pool.save_and_publish(tensors, 5, folder, keep=1)
        assert saved(folder) == {f"epoch-{epoch}-version-5"}


def test_the_synchronous_pool_makes_tensors_in_the_callers_thread(
    workers: list[InProcess], tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Which device is the current one is a property of a thread."""
    folder = tmp_path / "saved"
    tensors = load_file(tiny_models.weights(3) / "model.safetensors")
    threads: set[str] = set()

    def generator() -> Iterator[tuple[str, torch.Tensor]]:
        for item in tensors.items():
            threads.add(threading.current_thread().name)
            yield item

    with blocking_pool(workers) as pool:
        done = pool.save_and_publish(generator(), 1, folder)
        assert done.replicas == len(workers)
        assert threads == {threading.current_thread().name}
