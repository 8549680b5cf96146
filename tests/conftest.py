"""Marks each test by the folder it lives in, so that `-m` selects a tier; starts the API server."""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from localkube import Cluster

TIERS = ("unit", "process", "api", "chart", "engine", "gpu", "cluster", "scale")
MARKERS = dict(zip(TIERS, TIERS, strict=True)) | {"contract": "engine"}
"""Marker of the tests in each folder."""
HERE = Path(__file__).parent
ENFORCED_FROM = 1000
"""So many unit tests in one run, and their time counts: the first one alone pays for what all import."""
UNIT_SECONDS = 1.0
"""Processor time that a unit test may take, with all its threads, where `LOOP_STEPS` take `LOOP_SECONDS`. They take 0.4 s at
most, by themselves; two hyperthreads of a busy core double that."""
LOOP_STEPS, LOOP_SECONDS = 1_000_000, 0.045
UNIT_CLOCK_SECONDS = 10.0
"""The same by the clock, of which a busy machine gives a test a fifth: one that sleeps belongs into tests/process."""

# How long an example takes says how busy the machine is, and nothing of the code.
# Every day the same examples, so that a failure is the change's; `--soak` looks for new ones.
settings.register_profile(
    "daily", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "soak", parent=settings.get_profile("daily"), derandomize=False, max_examples=2000
)
settings.load_profile("daily")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens", action="store_true", help="write the goldens anew; review the diff"
    )
    parser.addoption(
        "--soak",
        action="store_true",
        help="run what is marked `soak`, and every property with many more examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("soak"):
        settings.load_profile("soak")


def pytest_collection_finish() -> None:
    """Take what was imported out of every later collection of garbage, of which engines cause many."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    runs = _is_soak if config.getoption("soak") else _is_daily
    other: list[pytest.Item] = []
    for item in items:
        tier = item.path.relative_to(HERE).parts[0]
        if tier in MARKERS:
            item.add_marker(getattr(pytest.mark, MARKERS[tier]))
        if not runs(item):
            other.append(item)
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if runs(item)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a unit test that is too slow for its tier; a property, which is hundreds of tests, may be."""
    few = item.session.testscollected < ENFORCED_FROM
    if few or item.get_closest_marker("unit") is None or _is_property(item):
        return (yield)
    clock, processor = time.monotonic(), time.process_time()
    result = yield
    clock, processor = time.monotonic() - clock, time.process_time() - processor
    slow = processor > UNIT_SECONDS and processor > UNIT_SECONDS * _core_slowness()
    if clock > UNIT_CLOCK_SECONDS or slow:
        pytest.fail(
            f"it took {clock:.2f} s, {processor:.2f} s of the processor: make it quicker, or move it to tests/process"
        )
    return result


def _core_slowness() -> float:
    """How many times as long as on the cores of `LOOP_SECONDS` a loop takes, measured now: cores here differ by four."""
    began, total = time.process_time(), 0
    for number in range(LOOP_STEPS):
        total += number
    return (time.process_time() - began) / LOOP_SECONDS


def _is_daily(item: pytest.Item) -> bool:
    return item.get_closest_marker("soak") is None


def _is_soak(item: pytest.Item) -> bool:
    """Whether `make soak` runs a test: marked, or one of hypothesis, then with more examples."""
    return _is_property(item) or not _is_daily(item)


def _is_property(item: pytest.Item) -> bool:
    """Whether hypothesis makes the examples of a test."""
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


@pytest.fixture(scope="session")
def api_server() -> Iterator[Cluster]:
    """A control plane of this session; each test keeps to a namespace of its own."""
    from tests.support.clusters import control_plane

    with control_plane("api") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def crd(api_server: Cluster) -> Cluster:
    """The control plane with the CustomResourceDefinition."""
    from tests.support.clusters import await_crd

    api_server.kubectl("apply", "--server-side", "-f", HERE.parent / "operator" / "crd.yaml")
    await_crd(api_server)
    return api_server
