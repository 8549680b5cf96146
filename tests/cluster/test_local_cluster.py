"""The local cluster itself: what every other cluster test stands on."""

from __future__ import annotations

import logging
import time

from clusters import control_plane
from localkube import Cluster

logger = logging.getLogger(__name__)


def test_two_control_planes_run_side_by_side_and_leave_no_trace() -> None:
    began = time.monotonic()
    with control_plane("first") as first, control_plane("second") as second:
        logger.info("two control planes ready after %.1f s", time.monotonic() - began)
        assert first.settings.api_port != second.settings.api_port
        first.kubectl("create", "namespace", "only-here")
        assert "only-here" in first.kubectl("get", "namespaces", "-o", "name")
        assert "only-here" not in second.kubectl("get", "namespaces", "-o", "name")
        states = (first.state, second.state)
    assert not any(state.exists() for state in states)
    assert not {first.name, second.name} & set(Cluster.names())
