"""Fixtures of the engine tier: tiny models, what plain transformers says of them, engines that are imported once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollout_worker.engine import Engine
from tests.support.engine.engine_kinds import KINDS, left_out
from tests.support.engine.engine_programs import EnginePrograms, engine_programs
from tests.support.engine.engines import serving
from tests.support.engine.lending_worker import bring_back
from tests.support.engine.push_rig import Nursery
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.tinymodels import tiny_models as tiny_models
from tests.support.engine.workers import PROMPT, InProcess


@pytest.fixture(scope="session")
def reference(tiny_models: TinyModels) -> Reference:
    return Reference(tiny_models.model(1))


@pytest.fixture(scope="session")
def reference_2(tiny_models: TinyModels) -> Reference:
    return Reference(tiny_models.weights(2))


@pytest.fixture(scope="session")
def references(tiny_models: TinyModels) -> dict[int, list[int]]:
    """The greedy tokens of the weights of each seed."""
    return {seed: Reference(tiny_models.weights(seed)).greedy(PROMPT, 8) for seed in (1, 2, 3)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lock directory of a node."""
    return tmp_path_factory.mktemp("turn")


@pytest.fixture
def asleep(worker: InProcess, tiny_models: TinyModels, directory: Path) -> tuple[int, int]:
    """The module's worker has the weights of seed 1 from files, and sleeps; returns the next identity."""
    return bring_back(worker, tiny_models.weights(1), directory)


@pytest.fixture
async def engine(tiny_models: TinyModels) -> AsyncIterator[Engine]:
    """An hf engine that serves the first model."""
    async with serving(tiny_models.model(1)) as (engine, _):
        yield engine


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Starts the processes of one module, which may kill themselves."""
    made = Nursery(tmp_path_factory.mktemp("nursery") / "log")
    yield made
    made.close()


@pytest.fixture(scope="session")
def vllm_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePrograms]:
    yield from _programs("vllm", tmp_path_factory)


@pytest.fixture(scope="session")
def sglang_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePrograms]:
    yield from _programs("sglang", tmp_path_factory)


def _programs(engine: str, made: pytest.TempPathFactory) -> Iterator[EnginePrograms]:
    if reason := left_out(KINDS[engine]):
        pytest.skip(reason)
    with engine_programs(engine, made.mktemp(f"{engine}-programs")) as programs:
        yield programs
