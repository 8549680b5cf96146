"""Marks each test by the folder it lives in, so that `-m` selects a tier; starts the API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from localkube import Cluster

TIERS = ("unit", "api", "chart", "engine", "cluster", "scale")
MARKERS = dict(zip(TIERS, TIERS, strict=True)) | {"contract": "engine"}
"""Marker of the tests in each folder."""
HERE = Path(__file__).parent

# How long an example takes says how busy the machine is, and nothing of the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens", action="store_true", help="write the goldens anew; review the diff"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = item.path.relative_to(HERE).parts[0]
        if tier in MARKERS:
            item.add_marker(getattr(pytest.mark, MARKERS[tier]))


@pytest.fixture(scope="session")
def api_server() -> Iterator[Cluster]:
    """A control plane of this session; each test keeps to a namespace of its own."""
    from clusters import control_plane

    with control_plane("api") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def crd(api_server: Cluster) -> Cluster:
    """The control plane with the CustomResourceDefinition."""
    api_server.kubectl("apply", "--server-side", "-f", HERE.parent / "operator" / "crd.yaml")
    api_server.kubectl(
        "wait", "--for=condition=Established", "crd/rolloutreplicas.rollout.dev", "--timeout=30s"
    )
    return api_server
