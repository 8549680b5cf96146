"""One worker of every engine, for all tests: most leave it idle and Active, some let its engine die.

An engine that starts costs up to a minute of a processor.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.api.reviews import reviews
from tests.support.engine.contracts import Fleet, Served
from tests.support.engine.engine_kinds import EMBEDDED, EngineKind, kinds, left_out
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.tinymodels import tiny_models as tiny_models
from tests.support.waiting import until_sync

EMBEDDED_DAILY = (
    "test_contract_holds",
    "test_contract_info",
    "test_contract_pushed",
    "test_contract_zz_ends",
)
"""What tells an embedded worker from others, if anything does: memory, threads and the end, with hf. The rest is for
`make soak`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        given = getattr(getattr(item, "callspec", None), "params", {})
        kind = given.get("kind")
        if kind in EMBEDDED and not (kind.engine == "hf" and item.path.stem in EMBEDDED_DAILY):
            item.add_marker(pytest.mark.soak)
        # A start of vLLM is most of a minute, and its other model that sees goes the same way.
        if (given.get("models"), getattr(kind, "engine", None)) == ("llava", "vllm"):
            item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="session", params=[*kinds(), *EMBEDDED], ids=str)
def kind(request: pytest.FixtureRequest) -> EngineKind:
    kind: EngineKind = request.param
    reason = left_out(kind)
    if reason:
        pytest.skip(reason)
    assert kind.python.exists(), f"{kind} has no environment: make its target ({kind.python})"
    return kind


@pytest.fixture(scope="session")
def fleet(
    kind: EngineKind, tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    home = tmp_path_factory.mktemp(f"contract-{kind}")
    with reviews() as api:
        fleet = Fleet(kind, tiny_models, home, api)
        try:
            yield fleet
        finally:
            fleet.stop()


@pytest.fixture
def worker(fleet: Fleet) -> Iterator[Served]:
    """Records logprobs of the sampling distribution; serves the weights of seed 1."""
    worker = fleet.worker()
    worker.heal()
    restarts = worker.state()["restarts"]
    yield worker
    until_sync(worker.idle, 30, what="requests to end")
    state = worker.state()
    assert state["restarts"] == restarts, f"the engine died: {state['last_error']}"
    assert state["holds"] == []


@pytest.fixture
def mortal(fleet: Fleet) -> Served:
    """The same worker, for tests that end its engine or the worker itself."""
    worker = fleet.worker()
    worker.heal()
    return worker


@pytest.fixture(scope="session")
def reference(tiny_models: TinyModels) -> dict[int, Reference]:
    """Plain transformers with the weights of each seed."""
    return {seed: Reference(tiny_models.weights(seed)) for seed in (1, 2, 3)}
