"""A trainer's tensors into real engines, through the client and the weights' port: shared memory and TCP."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import pytest
from safetensors.torch import load_file

from rollout_client import AsyncRolloutPool, DirectOptions
from tests.support.engine import delta_rank
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, InProcess, ports_of, several_in_process
from tests.support.unit.nixl_library import nixl_installed
from tests.support.unit.ranks import ranks

TOKEN = "secret-of-the-tests"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
VERSIONS = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def nixl() -> Iterator[None]:
    with nixl_installed():
        yield


@pytest.fixture(scope="module")
def workers(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[InProcess]]:
    home = tmp_path_factory.mktemp("pushed")
    (home / "token").write_text(TOKEN)
    flags = "--auth", "token", "--auth-token-file", str(home / "token"), "--weights-port", "0"
    own = [("--weights-socket", str(home / f"{name}.sock")) for name in "ab"]
    with several_in_process(tiny_models.model(1), *flags, own=own, token=TOKEN) as workers:
        yield workers


@pytest.fixture
async def pool(workers: list[InProcess]) -> AsyncIterator[AsyncRolloutPool]:
    direct = DirectOptions(token=lambda: TOKEN, in_flight="Abort")
    async with AsyncRolloutPool.from_urls(**ports_of(workers), direct=direct) as pool:
        yield pool


def tokens(worker: InProcess) -> list[int]:
    """What the engine makes of the prompt, greedily."""
    answer = worker.generate(token_ids=PROMPT, sampling=GREEDY)
    assert answer.status_code == 200, answer.text
    made: list[int] = answer.json()["outputs"][0]["token_ids"]
    return made


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
async def test_the_next_version_goes_as_what_differs_from_the_one_that_serves(
    pool: AsyncRolloutPool,
    workers: list[InProcess],
    tiny_models: TinyModels,
    transport: Literal["tcp", "nixl"],
) -> None:
    tensors = load_file(Path(tiny_models.weights(2)) / "model.safetensors")
    first = await pool.publish_weights(next(VERSIONS), tensors=tensors, transport=transport)
    assert first.report is not None
    assert first.report.deltas == 0
    assert first.report.bytes_sent == first.report.bytes
    before = [tokens(each) for each in workers]
    for step in range(3):
        for tensor in tensors.values():
            tensor.view(-1)[step :: 500 + step] *= -1
        published = await pool.publish_weights(next(VERSIONS), tensors=tensors, transport=transport)
        report = published.report
        assert report is not None
        assert (report.deltas, report.bytes) == (2, first.report.bytes)
        assert 0 < report.bytes_sent < report.bytes / 10
        made = [tokens(each) for each in workers]
        whole = await pool.publish_weights(
            next(VERSIONS), tensors=tensors, transport=transport, base=None
        )
        assert whole.report is not None
        assert (whole.report.deltas, whole.root_hash) == (0, published.root_hash)
        assert [tokens(each) for each in workers] == made, "as the whole bytes make them"
        # Of a publish with base=None nothing is kept: the next one is whole, and a base again.
        again = await pool.publish_weights(next(VERSIONS), tensors=tensors, transport=transport)
        assert again.report is not None
        assert again.report.deltas == 0
    assert made != before


@pytest.mark.parametrize("transport", ["tcp", "nixl"])
async def test_several_ranks_publish_what_differs_too_and_all_get_the_same_report(
    pool: AsyncRolloutPool,
    workers: list[InProcess],
    tiny_models: TinyModels,
    tmp_path: Path,
    transport: str,
) -> None:
    weights, versions = str(tiny_models.weights(2)), [next(VERSIONS) for _ in range(3)]
    story = {
        "ports": ports_of(workers),
        "token": TOKEN,
        "weights": weights,
        "versions": versions,
        "transport": transport,
    }
    with ranks(delta_rank.main, 2, tmp_path, json.dumps(story)) as started:
        for rank in started:
            assert rank.status(120) == 0, rank.said
    first, second, third = json.loads((tmp_path / "report-0").read_text())
    assert json.loads((tmp_path / "report-1").read_text()) == [first, second, third]
    assert (first["deltas"], first["bytes_sent"]) == (0, first["bytes"])
    for report in (second, third):
        assert report["deltas"] == 2
        assert 0 < report["bytes_sent"] < report["bytes"] / 10
    made = [tokens(each) for each in workers]
    tensors = load_file(Path(weights) / "model.safetensors")
    for _ in range(2):
        for tensor in tensors.values():
            tensor.view(-1)[::500] *= -1
    whole = await pool.publish_weights(next(VERSIONS), tensors=tensors, base=None)
    assert whole.root_hash == third["root"]
    assert [tokens(each) for each in workers] == made
