"""Adapters from a trainer to two workers and back: by pushes, from folders, and as docs/adapters.md shows it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout_client import PublishFailed, RolloutPool
from tests.support.doc_manifests import run_code
from tests.support.engine.engine_kinds import read_program_answer
from tests.support.engine.lora_adapters import (
    adapter_tensors,
    config_of,
    merged_reference,
    save_adapter,
)
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.tinymodels import tiny_models as tiny_models
from tests.support.engine.workers import PROMPT, InProcess, ports_of, several_in_process

ROOT = Path(__file__).parents[2]
PEFT = Path(os.environ.get("ROLLOUT_CACHE", ROOT / ".cache"), "env-verl")
JOB = ROOT / "tests" / "support" / "engine" / "peft_job.py"
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def workers(tiny_models: TinyModels) -> Iterator[list[InProcess]]:
    with several_in_process(tiny_models.model(1), "--weights-port", "0") as workers:
        yield workers


@pytest.fixture
def pool(workers: list[InProcess]) -> Iterator[RolloutPool]:
    with RolloutPool.from_urls(**ports_of(workers)) as pool:
        pool.acquire()
        yield pool
        pool.publish_weights(1000, path=None)


class PeftModel:
    """What the client reads of a PEFT model: its configurations, and parameters by PEFT's names."""

    def __init__(self, tensors: dict[str, torch.Tensor], name: str = "default") -> None:
        self.peft_config = {name: SimpleNamespace(to_dict=config_of)}
        self.active_adapter = name
        self._tensors = {key.replace(".weight", f".{name}.weight"): t for key, t in tensors.items()}

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {**self._tensors, "base_model.model.model.norm.weight": torch.ones(4)}


def test_the_code_of_the_page_runs(
    pool: RolloutPool, tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RolloutPool, "from_cluster", lambda *_: pool)
    tensors = {seed: adapter_tensors(tiny_models.model(1), seed) for seed in (1, 2)}
    names: dict[str, Any] = {
        "ADAPTED_MODEL": PeftModel(tensors[1]),
        "FOLDER": save_adapter(tmp_path / "adapter", tensors[1]),
        "CONFIG": {"r": 8, "lora_alpha": 16},
        "TENSORS": tensors[2],
    }
    run_code("adapters.md", names)
    assert names["span"].adapter == "policy"


def test_every_worker_serves_what_was_published(
    pool: RolloutPool, workers: list[InProcess], tiny_models: TinyModels, tmp_path: Path
) -> None:
    """A model of PEFT, a folder, and pairs give the same; the conversation's spans tell them apart."""
    tensors = {seed: adapter_tensors(tiny_models.model(1), seed) for seed in (1, 2)}
    judges = {seed: merged_reference(tiny_models.model(1), tensors[seed]) for seed in (1, 2)}
    folder = save_adapter(tmp_path / "adapter", tensors[1])
    hashes = set()
    given: list[Any] = [PeftModel(tensors[1], "mine"), folder, (config_of(), tensors[1])]
    for version, each in enumerate(given, 1):
        other = (config_of(), tensors[2])
        pool.publish_weights(version, adapters={"policy": each, "other": other})
        for worker in workers:
            active = worker.state()["weights"]["active"]
            hashes |= {adapter["root_hash"] for adapter in active["adapters"]}
            for name, seed in (("policy", 1), ("other", 2)):
                found = worker.sample(adapter=name)
                assert found["token_ids"] == judges[seed].greedy(PROMPT, 8)
                assert found["weights"][0]["adapter"] == name
    assert len(hashes) == 2, "the same content has the same hash"
    results = pool.generate_many([PROMPT] * 4, sampling=GREEDY, adapter="other")
    assert all(list(r.token_ids) == judges[2].greedy(PROMPT, 8) for r in results)
    pool.publish_weights(10, path=str(tmp_path / "adapter"))
    assert pool.generate(PROMPT, sampling=GREEDY, adapter="default").output.weights[0].version == 10


def test_a_model_of_peft_itself(
    workers: list[InProcess], tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Its tokens are greedy, and its logprobs PEFT's, pushed and by its own files."""
    worker = workers[0]
    words = [str(tiny_models.model(1)), worker.url, worker.control_url, str(tmp_path / "saved")]
    found = read_program_answer(
        [sys.executable, str(JOB), *words], 120, PYTHONPATH=f"{ROOT / 'src'}:{PEFT}"
    )
    for way in ("pushed", "saved"):
        for name in ("default", "second"):
            assert found[way][name]["greedy"], (way, name)
            assert found[way][name]["off"] < 1e-4, (way, name)


def test_what_is_no_adapter_is_refused_with_its_name(
    pool: RolloutPool, tiny_models: TinyModels, tmp_path: Path
) -> None:
    tensors = adapter_tensors(tiny_models.model(1), 1)
    cases: list[tuple[Any, str]] = [
        ({}, "1 to 64"),
        ({"../x": (config_of(), tensors)}, "names no adapter"),
        ({"policy": 7}, "int is not an adapter"),
        ({"policy": (config_of(use_dora=True), tensors)}, "use_dora"),
        ({"policy": (config_of(rank=0), tensors)}, "r is 0"),
        ({"policy": (config_of(), {"lm_head.weight": torch.zeros(2, 2)})}, "lm_head"),
        ({"policy": tmp_path / "nowhere"}, "can't be read"),
    ]
    for adapters, said in cases:
        with pytest.raises(ValueError, match=said):
            pool.publish_weights(1, adapters=adapters)
    with pytest.raises(TypeError, match="only one of them"):
        pool.publish_weights(1, "folder", adapters={"policy": (config_of(), tensors)})
    with pytest.raises(TypeError, match="without tensors"):
        pool.publish_weights(1, adapters={"policy": (config_of(), tensors)}, cast=True)
    wrong = {name: tensor[:, :-1].contiguous() for name, tensor in tensors.items()}
    with pytest.raises(PublishFailed, match="must be"):
        pool.publish_weights(1, adapters={"policy": (config_of(), wrong)})
