"""The code blocks of the client's pages and verl's interfaces, on two real workers."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import rollout_client
from rollout_client import AsyncRolloutPool, PrometheusHook, RolloutPool, TurnFailed
from rollout_client.steering import direct_steering
from rollout_common.turn import Turn
from rollout_common.turn.lock_files import holders
from tests.support.doc_manifests import DOCS, code_blocks
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import InProcess, ports_of, several_in_process

DEVICES = ("gpu-0", "gpu-1")
"""One of each worker."""


@pytest.fixture(scope="module")
def volume(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared volume, as the pages have it."""
    folder = tmp_path_factory.mktemp("volume")
    for step in (1, 2):
        shutil.copytree(tiny_models.weights(step + 1), folder / "steps" / str(step))
    broadcast = folder / "broadcasts" / "step_3"
    shutil.copytree(tiny_models.weights(2), broadcast)
    (broadcast / "STABLE").touch()
    return folder


@pytest.fixture(scope="module")
def workers(tiny_models: TinyModels, volume: Path) -> Iterator[list[InProcess]]:
    turns = volume / "turns"
    turns.mkdir()
    flags = ["--weights-roots", str(volume), "--turn-directory", str(turns)]
    own = [("--turn-devices", device) for device in DEVICES]
    with several_in_process(tiny_models.model(1), *flags, own=own) as workers:
        yield workers


@pytest.fixture
def urls(workers: list[InProcess]) -> dict[str, Any]:
    return ports_of(workers)


@dataclass
class Sample:
    """The fields of slime's `Sample` that its generate functions fill."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"

    prompt: str
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    session_id: str | None = None


@pytest.mark.parametrize(
    "page", ["generate.md", "publish-weights.md", "from-slime-and-prime-rl.md"]
)
def test_the_code_of_a_page_runs(
    page: str, urls: dict[str, Any], volume: Path, tiny_models: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Only the pool's members differ: two workers here instead of a cluster's."""
    for kind in (RolloutPool, AsyncRolloutPool):
        made = partial(kind.from_urls, **urls)
        monkeypatch.setattr(kind, "from_cluster", lambda name, namespace, made=made: made())
    names: dict[str, Any] = {
        "FOLDER": volume,
        "OUTPUT_DIR": volume,
        "SAMPLE": Sample("roll out the policy"),
        "TOKENIZER": PreTrainedTokenizerFast.from_pretrained(tiny_models.model(1)),
        "MOUNTED_AT": "",
        "MODEL": AutoModelForCausalLM.from_pretrained(tiny_models.model(1)),
        "TENSORS": load_file(tiny_models.weights(3) / "model.safetensors"),
    }
    try:
        for block in code_blocks(page):
            text = block.replace(
                "from_urls(urls, direct=direct)",
                f"from_urls({urls['urls']}, control_urls={urls['control_urls']}, direct=direct)",
            )
            assert "gpu-1" not in text or "control_urls" in text, "the block has changed"
            exec(compile(text, page, "exec"), names)
    finally:
        if "pool" in names:
            names["pool"].close()


@pytest.fixture
async def pool(urls: dict[str, Any]) -> AsyncIterator[AsyncRolloutPool]:
    async with AsyncRolloutPool.from_urls(**urls) as pool:
        yield pool


async def test_slimes_function_samples_as_slimes_own(
    pool: AsyncRolloutPool, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temperature of 0 is not left out, seeds count, and a prompt gets no second BOS: slime has applied the template."""
    monkeypatch.setattr(AsyncRolloutPool, "from_cluster", lambda name, namespace: pool)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_models.model(1))
    bos: Any = (tokenizer.convert_ids_to_tokens(1), 1)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos[0]} $A", special_tokens=[bos]
    )
    names: dict[str, Any] = {"TOKENIZER": tokenizer}
    exec(code_blocks("from-slime-and-prime-rl.md")[0], names)
    for more in ({"temperature": 0.0}, {"sampling_seed": 7}):
        params = {"temperature": 1.0, "max_new_tokens": 8, "stop": None, **more}
        samples = [await names["generate"](None, Sample("roll out"), params) for _ in range(2)]
        assert samples[0].tokens == samples[1].tokens
        assert samples[0].tokens[:-8] == tokenizer.encode("roll out", add_special_tokens=False)


async def test_workers_give_their_devices_to_the_trainer_for_its_turn(
    pool: AsyncRolloutPool, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through an error inside, and a turn that another one keeps."""
    monkeypatch.setattr(direct_steering, "STATE_ASK_SECONDS", 0.5)
    monkeypatch.setenv("ROLLOUT_TURN_HOLDER", "trainer-0")
    directory = volume / "turns"
    serving = holders(directory)
    assert set(serving) == set(DEVICES)
    assert None not in serving.values()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012  # from inside the turn
        async with pool.turn(devices=DEVICES, directory=directory, seconds=60) as turn:
            assert turn.devices == DEVICES
            assert holders(directory) == dict.fromkeys(DEVICES, "trainer-0")
            assert pool.load() == {member.name: 0 for member in pool.members}
            raise ZeroDivisionError
    assert holders(directory) == dict.fromkeys(DEVICES, "trainer-0"), (
        "its memory may still be there"
    )
    async with pool.turn(devices=DEVICES, directory=directory, seconds=60):
        pass
    await pool.wake(seconds=60)
    assert holders(directory) == serving
    other = Turn(directory, ["gpu-2"], "trainer-9")
    other.take(5)
    try:
        with pytest.raises(TurnFailed, match="gpu-2 is held by trainer-9"):
            async with pool.turn(devices=[*DEVICES, "gpu-2"], directory=directory, seconds=3):
                raise AssertionError
    finally:
        other.give()
    await pool.wake(seconds=60)
    assert holders(directory) == {**serving, "gpu-2": None}
    done = await pool.generate([5, 6, 7], sampling={"max_tokens": 2, "ignore_eos": True})
    assert len(done.output.token_ids) == 2


def test_the_metrics_of_the_client_are_described() -> None:
    registry = CollectorRegistry()
    PrometheusHook("math", registry)
    found = [(each.name, each.type == "counter") for each in registry.collect()]
    names = {name + "_total" * counts for name, counts in found}
    table = (DOCS / "generate.md").read_text().split("## Metrics")[1]
    assert set(re.findall(r"`(rollout_client_\w+)`", table)) == names


def test_every_error_of_a_generation_is_described() -> None:
    table = (DOCS / "generate.md").read_text().split("## Errors")[1]
    described = set(re.findall(r"^\| `(\w+)`", table.split("## Metrics")[0], re.MULTILINE))
    errors = {
        name
        for name in rollout_client.__all__
        if isinstance(kind := getattr(rollout_client, name), type)
        and issubclass(kind, rollout_client.RequestError)
    }
    assert described == errors - {"RequestError"}
