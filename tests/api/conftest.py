"""What several files of the tier share, beside the API server itself."""

from __future__ import annotations

import pytest

from localkube import Cluster
from tests.support.api.people import install_policy


@pytest.fixture(scope="session")
def policed(crd: Cluster) -> Cluster:
    """The control plane with the chart's roles and admission policy, enforced from now on."""
    install_policy(crd)
    return crd
