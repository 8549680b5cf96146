"""Tensors pushed to a pool through the operator: how often a replica is called, and what the operator adds."""

from __future__ import annotations

import logging
from statistics import median

from localkube import Cluster
from tests.support.api.pushlab import push_lab

logger = logging.getLogger(__name__)

REPLICAS, UPDATES, WARM_UP = 3, 8, 2
CALLS = 4
"""Of a replica's control port, for one update: its state, stage, a look, commit."""


async def test_an_update_takes_four_calls_of_each_replica(crd: Cluster) -> None:
    async with push_lab(crd, "pushes", REPLICAS) as lab:
        for _ in range(WARM_UP):
            await lab.publish()
        before, calls, seconds = lab.calls(), list[int](), list[float]()
        for _ in range(UPDATES):
            done = await lab.publish()
            assert done.report is not None
            assert {each.error for each in done.report.replicas.values()} == {None}
            assert len(done.report.replicas) == REPLICAS
            seconds.append(done.report.seconds["commit"])
            now = lab.calls()
            calls += [after - then for after, then in zip(now, before, strict=True)]
            before = now
        kinds = [worker.asked() for worker in lab.workers]
    logger.warning("calls: %s, kinds: %s, commit: %s s", calls, kinds, seconds)
    # A pool that rests is asked every few seconds, too, and that may fall into an update.
    assert median(calls) <= CALLS
    assert sum(calls) <= (CALLS + 0.5) * len(calls)
