"""A program: a trainer that generates from a pool and pushes to it, with the operator, sending spans.

    python traced_push.py CLUSTER NAMESPACE

All of `pushlab`; `OTEL_EXPORTER_OTLP_ENDPOINT` says where the spans of this process and of the workers go. It is a process
of its own, for OpenTelemetry can be set up once in each. It prints how often each replica's control port was asked
for each of its later pushes, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys

from localkube import Cluster
from rollout_client import AsyncRolloutPool
from rollout_common import tracing
from tests.support.api.pushlab import push_lab

REPLICAS, UPDATES = 2, 8


async def push_and_generate(cluster: Cluster, namespace: str) -> list[int]:
    async with push_lab(cluster, namespace, REPLICAS) as lab:
        await lab.publish()
        async with AsyncRolloutPool.from_urls([lab.workers[0].url]) as pool:
            await pool.generate([1, 2, 3], sampling={"max_tokens": 4})
        await lab.publish()
        before, calls = lab.calls(), list[int]()
        for _ in range(UPDATES):
            done = await lab.publish()
            assert done.report is not None
            assert [each.error for each in done.report.replicas.values()] == [None] * REPLICAS
            now = lab.calls()
            calls += [after - then for after, then in zip(now, before, strict=True)]
            before = now
        await asyncio.sleep(1)  # the workers are killed: they have sent their spans before
    return calls


if __name__ == "__main__":
    assert tracing.start_tracing("trainer"), "OTEL_EXPORTER_OTLP_ENDPOINT says where spans go"
    asked = asyncio.run(push_and_generate(Cluster.attach(sys.argv[1]), sys.argv[2]))
    tracing.stop_tracing()
    sys.stdout.write(json.dumps(asked))
