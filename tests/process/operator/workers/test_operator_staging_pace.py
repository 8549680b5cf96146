"""How often workers are asked while hundreds of them stage weights: by the polls, and hardly by the calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from rollout_client.worker_control import WorkerControl
from rollout_operator.api.objects import PoolKey
from rollout_operator.core.pass_plan import CallWorker, ControlVerb
from rollout_operator.workers.head_poller import MAX_POLLS_PER_SECOND, HeadPoller
from rollout_operator.workers.worker_calls import WorkerCalls
from rollout_operator.workers.worker_clients import WorkerClients
from rollout_worker.schemas import StagedWeights, StageRequest, StageSource, WeightsSource
from tests.support.unit.poolspecs import a_pod, spec_of
from tests.support.unit.simworker import SimWorker
from tests.support.unit.virtualtime import run

KEY = PoolKey("rl", "math")
SOURCE = WeightsSource(path="/w/1")
STAGE = StageRequest(epoch=1, version=1, source=StageSource.of(SOURCE))
HEADS, SECONDS = 200, 20.0
"""How many stage at once, and for how long."""
LOOKS = 3
"""After 0.1, 0.3 and 0.7 s."""


class Workers:
    """Workers that stage for so long; `asked` counts what they were asked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.asked: Counter[str] = Counter()
        self.poller = HeadPoller(
            lambda key, address: self.control(key, address).state(), lambda key: None, clock=clock
        )
        self.calls = WorkerCalls(lambda key: None, clock=clock)
        self.clients = WorkerClients(self.poller, self.calls, self.control)

    def control(self, key: PoolKey, address: str) -> WorkerControl:
        async def token() -> str | None:
            return None

        return WorkerControl(f"http://{address}", token, self._send)

    async def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, seconds: float
    ) -> tuple[int, bytes]:
        verb = url.rpartition("/")[2]
        self.asked[verb] += 1
        phase = "Staging" if self.clock() < SECONDS else "Staged"
        slot = StagedWeights.model_validate(
            {"epoch": 1, "version": 1, "source": SOURCE, "phase": phase}
        )
        if verb == "stage":
            return 200, slot.model_dump_json().encode()
        return 200, SimWorker("b1", loading=False, staged=slot).state().model_dump_json().encode()

    def running(self) -> int:
        return sum(self.calls.running_call(f"u{n}/stage") is not None for n in range(HEADS))


def test_many_workers_that_stage_are_asked_at_the_pace_of_the_polls() -> None:
    async def scene(clock: Callable[[], float]) -> None:
        workers = Workers(clock)
        pods = [a_pod(spec_of(), n, uid=f"u{n}", ip=f"10.0.0.{n}") for n in range(HEADS)]
        workers.clients.watch_heads(KEY, pods, {pod.uid for pod in pods})
        polling = asyncio.create_task(workers.poller.run())
        for pod in pods:
            call = CallWorker(pod.uid, pod.name, ControlVerb.STAGE, STAGE, 600)
            assert workers.clients.start_call(KEY, pod, call)
        await asyncio.sleep(SECONDS - clock())
        assert (workers.running(), workers.asked["stage"]) == (HEADS, HEADS)
        assert workers.asked["state"] <= LOOKS * HEADS + 1.2 * MAX_POLLS_PER_SECOND * SECONDS
        await asyncio.sleep(1.5)
        assert workers.running() == 0, "each ends with the next poll"
        polling.cancel()
        await asyncio.wait({polling})

    run(scene)
