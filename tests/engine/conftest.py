"""Fixtures of the engine tier: tiny models, what plain transformers says of them."""

from __future__ import annotations

import pytest

from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.tinymodels import tiny_models as tiny_models


@pytest.fixture(scope="session")
def reference(tiny_models: TinyModels) -> Reference:
    return Reference(tiny_models.model(1))


@pytest.fixture(scope="session")
def reference_2(tiny_models: TinyModels) -> Reference:
    return Reference(tiny_models.weights(2))
