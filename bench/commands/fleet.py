"""A push through the operator until 8 replicas have committed it, against a bare PATCH.

The operator and the API server are real; workers are real processes over an engine whose weights are
two bytes, so that what is left of an update is steering: from the call of `publish_weights` over the
calls that open the replicas' slots, the trainer's patch of the target and the operator's barrier until
the trainer has seen in status that all have committed. The baseline is the bare PATCH
of an annotation until a watch shows it. The barrier needs at least three of these, since staging,
committing and committed are each written before the next step.
"""

from __future__ import annotations

import asyncio
import time

from bench.figures import Goal, Options, Result, figure
from localkube import Cluster
from localkube.home import REPOSITORY
from rollout_client import PublishProgress
from tests.support.api.apiclient import POOLS, Api, Seen, Watch, watching
from tests.support.api.pushlab import POOL, push_lab
from tests.support.clusters import await_crd, control_plane

NAMESPACE = "bench-fleet"
REPLICAS, WARM_UP = 8, 3
SEEN_SECONDS = 30.0
GOAL = Goal(median=0.5, tail=0.5)


class Marks(dict[str, float]):
    """When each phase of a publish was first reported."""

    def saw(self, progress: PublishProgress) -> None:
        self.setdefault(progress.phase, time.monotonic())


def run(options: Options) -> Result:
    rounds = options.count(100, 8)
    with control_plane(NAMESPACE) as cluster:
        cluster.kubectl("apply", "--server-side", "-f", REPOSITORY / "operator" / "crd.yaml")
        await_crd(cluster)
        return asyncio.run(_measure(cluster, rounds))


async def _measure(cluster: Cluster, rounds: int) -> Result:
    whole, added, before_that, decided, calls, bare = [], [], [], [], list[int](), []
    path = POOLS.format(NAMESPACE)
    async with push_lab(cluster, NAMESPACE, REPLICAS) as lab:
        with Api(cluster) as api, watching(cluster, path) as (pools,):
            for _ in range(WARM_UP):
                await lab.publish()
            for index in range(rounds):
                before = lab.calls()
                marks = Marks()
                done = await lab.publish(marks.saw)
                assert done.report is not None
                seconds = done.report.seconds
                whole.append(sum(seconds.values()) - seconds["transfer"])
                added.append(seconds["commit"])
                before_that.append(whole[-1] - added[-1])
                if "Committing" in marks:  # else the watch showed the end of it at once
                    decided.append(marks["Complete"] - marks["Committing"])
                calls += [now - then for now, then in zip(lab.calls(), before, strict=True)]
                bare.append(await asyncio.to_thread(_round_trip, api, pools, index))
    return Result(
        "fleet",
        f"A push to {REPLICAS} replicas through the operator",
        [
            figure("publish until all have committed, less the bytes' own time", whole, baseline=bare,
                   against="a bare PATCH until a watch shows it", goal=GOAL),
            figure("… until all have staged", before_that),
            figure("… all staged until all have committed", added, goal=GOAL),
            figure("… of that, since the decision to commit was seen in status", decided),
            figure("calls of one replica's control port", list(map(float, calls)), unit="calls",
                   goal=Goal(median=4)),
        ],
        [f"{REPLICAS} workers, the operator, the API server and the trainer share these cores."],
    )  # fmt: skip


def _round_trip(api: Api, pools: Watch, index: int) -> float:
    began = time.monotonic()
    mark = {"bench.example/mark": str(index)}
    api.patch(f"{POOLS.format(NAMESPACE)}/{POOL}", {"metadata": {"annotations": mark}})

    def shown(seen: Seen) -> bool:
        notes = seen.obj["metadata"].get("annotations") or {}
        return bool(notes.get("bench.example/mark") == str(index))

    return pools.first("the mark", shown, began, SEEN_SECONDS).at - began
