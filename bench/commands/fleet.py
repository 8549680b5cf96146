"""A push through the operator until 8 replicas have committed it, against a bare PATCH.

The operator and the API server are real; workers are real processes over an engine whose weights are
two bytes, so that what is left of an update is steering. The clock runs from the moment when the
last replica has said that it staged, over the trainer's patch of the target and the operator's
barrier, until the trainer has seen in status that all have committed. The baseline is the bare PATCH
of an annotation until a watch shows it: less than that no controller can take three times over, which
is what the barrier needs (staging, committing and committed are each written before the next step).
"""

from __future__ import annotations

import asyncio
import time

from apiclient import POOLS, Api, Seen, Watch, watching
from bench.options import Options
from bench.reporting.figures import Goal, Result, figure
from clusters import await_crd, control_plane
from localkube import Cluster
from localkube.home import REPOSITORY
from pushlab import POOL, push_lab
from rollout_client import PublishProgress

NAMESPACE = "bench-fleet"
REPLICAS, WARM_UP = 8, 3
SEEN_SECONDS = 30.0
GOAL = Goal(median=0.5, tail=0.5)


class Marks(dict[str, float]):
    """When each phase of a publish was first heard of."""

    def saw(self, progress: PublishProgress) -> None:
        """Note it."""
        self.setdefault(progress.phase, time.monotonic())


def run(options: Options) -> Result:
    """Measure."""
    rounds = options.count(50, 8)
    with control_plane(NAMESPACE) as cluster:
        cluster.kubectl("apply", "--server-side", "-f", REPOSITORY / "operator" / "crd.yaml")
        await_crd(cluster)
        return asyncio.run(_measure(cluster, rounds))


async def _measure(cluster: Cluster, rounds: int) -> Result:
    added, data, decided, calls, bare = [], [], [], list[int](), []
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
                added.append(done.report.seconds["commit"])
                if "Committing" in marks:  # else the watch showed the end of it at once
                    decided.append(marks["Complete"] - marks["Committing"])
                data.append(sum(done.report.seconds.values()) - added[-1])
                calls += [now - then for now, then in zip(lab.calls(), before, strict=True)]
                bare.append(await asyncio.to_thread(_round_trip, api, pools, index))
    return Result(
        "fleet",
        f"A push to {REPLICAS} replicas through the operator",
        [
            figure("all staged until all have committed", added, baseline=bare,
                   against="a bare PATCH until a watch shows it", goal=GOAL),
            figure("from the call until all have staged (two bytes of weights)", data),
            figure("of the first, since the decision to commit was seen in status", decided),
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
