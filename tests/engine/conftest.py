"""Fixtures of the engine tier: tiny models, what plain transformers says of them, one worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.engine.reference import Reference
from tests.support.engine.shared import Lender, Shared
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.tinymodels import tiny_models as tiny_models


@pytest.fixture(scope="session")
def reference(tiny_models: TinyModels) -> Reference:
    return Reference(tiny_models.model(1))


@pytest.fixture(scope="session")
def reference_2(tiny_models: TinyModels) -> Reference:
    return Reference(tiny_models.weights(2))


@pytest.fixture(scope="session")
def lender(tiny_models: TinyModels) -> Iterator[Lender]:
    lender = Lender(tiny_models.model(1))
    yield lender
    lender.close()


@pytest.fixture
def worker(lender: Lender) -> Shared:
    """As one that has just started; see `Shared` for the identities of its weights."""
    return lender.lend()
