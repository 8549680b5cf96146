"""Fixtures of the engine tier: tiny models, what plain transformers says of them, engines that are imported once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from rollout_worker.engine import Engine
from tests.support.engine.engine_kinds import KINDS, left_out
from tests.support.engine.engine_programs import EnginePrograms, engine_programs
from tests.support.engine.engines import serving
from tests.support.engine.push_rig import Nursery
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.tinymodels import tiny_models as tiny_models


@pytest.fixture(scope="session")
def reference(tiny_models: TinyModels) -> Reference:
    return Reference(tiny_models.model(1))


@pytest.fixture(scope="session")
def reference_2(tiny_models: TinyModels) -> Reference:
    return Reference(tiny_models.weights(2))


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
