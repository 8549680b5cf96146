"""A trainer's tensors into real engines, through the client and the weights' port: shared memory and TCP."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest
from safetensors.torch import load_file

from rollout_client import AsyncRolloutPool, DirectOptions
from tinymodels import TinyModels
from workers import PROMPT, InProcess, in_process

TOKEN = "secret-of-the-tests"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
VERSIONS = itertools.count(1)


@pytest.fixture(scope="module")
def workers(
    tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[InProcess]]:
    home = tmp_path_factory.mktemp("pushed")
    (home / "token").write_text(TOKEN)
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                in_process(
                    tiny_models.model(1),
                    *("--auth", "token", "--auth-token-file", str(home / "token")),
                    *("--weights-port", "0", "--weights-socket", str(home / f"{name}.sock")),
                    token=TOKEN,
                )
            )
            for name in "ab"
        ]


@pytest.fixture
async def pool(workers: list[InProcess]) -> AsyncIterator[AsyncRolloutPool]:
    data = [str(each.data.base_url).rstrip("/") for each in workers]
    control = [str(each.control.base_url).rstrip("/") for each in workers]
    direct = DirectOptions(token=lambda: TOKEN, in_flight="Abort")
    async with AsyncRolloutPool.from_urls(data, control_urls=control, direct=direct) as pool:
        yield pool


def tokens(worker: InProcess) -> list[int]:
    """What the engine makes of the prompt, greedily."""
    answer = worker.generate(token_ids=PROMPT, sampling=GREEDY)
    assert answer.status_code == 200, answer.text
    made: list[int] = answer.json()["outputs"][0]["token_ids"]
    return made


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_pushed_weights_make_the_tokens_that_the_same_files_make(
    pool: AsyncRolloutPool,
    workers: list[InProcess],
    tiny_models: TinyModels,
    transport: Literal["shm", "tcp"],
) -> None:
    folder = Path(tiny_models.weights(2))
    await pool.publish_weights(next(VERSIONS), str(folder))
    by_files = [tokens(each) for each in workers]
    hashes = [each.state()["weights"]["active"]["root_hash"] for each in workers]
    await pool.publish_weights(next(VERSIONS), str(tiny_models.weights(3)))
    assert [tokens(each) for each in workers] != by_files
    tensors = load_file(folder / "model.safetensors")
    version = next(VERSIONS)
    published = await pool.publish_weights(version, tensors=tensors, transport=transport)
    assert [tokens(each) for each in workers] == by_files
    for each, root_hash in zip(workers, hashes, strict=True):
        weights = each.state()["weights"]
        assert weights["active"]["version"] == version
        assert weights["active"]["root_hash"] == root_hash
        assert weights["kept"]["root_hash"] == root_hash
    assert published.report is not None
