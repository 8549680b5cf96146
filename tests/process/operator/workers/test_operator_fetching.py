"""One real worker fetches pushed weights from another one, as the operator has it do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rollout_client.worker_control import WorkerControl
from rollout_operator.api.objects import PoolKey
from rollout_operator.core.pass_plan import CallWorker, ControlVerb
from rollout_operator.workers.head_poller import HeadPoller
from rollout_operator.workers.worker_calls import CallFailure, WorkerCalls
from rollout_operator.workers.worker_clients import WorkerClients
from rollout_worker.ports.auth import AccessRight, Authorizer
from rollout_worker.ports.control_routes import make_control_app
from rollout_worker.schemas import PushedBytes, StageRequest, StageSource, WorkerState
from tests.support.unit.asgi import call
from tests.support.unit.poolspecs import a_pod, spec_of
from tests.support.unit.pushing import Version, push, pushed_worker
from tests.support.unit.tiny_worker import TinyWorker
from tests.support.waiting import until

KEY = PoolKey("rl", "math")
GIVER, JOINER = "127.0.0.1", "127.0.0.2"
"""Addresses of their pods; the joiner dials the first one itself."""


class Everyone(Authorizer):
    """Lets everybody in."""

    async def check_caller(
        self, authorization: str | None, right: AccessRight, address: str = ""
    ) -> str:
        return "operator"


class Operator:
    """Its calls to these two, without sockets."""

    def __init__(self, giver: TinyWorker, joiner: TinyWorker) -> None:
        both = {GIVER: giver, JOINER: joiner}
        self._apps = {ip: make_control_app(each.worker, Everyone()) for ip, each in both.items()}
        self._calls = WorkerCalls(lambda key: None)
        self._workers = WorkerClients(
            HeadPoller(self._ask, lambda key: None), self._calls, self._control
        )

    async def _ask(self, key: PoolKey, address: str) -> WorkerState:
        return await self._control(key, address).state()

    def _control(self, key: PoolKey, address: str) -> WorkerControl:
        return WorkerControl(f"http://{address}", _nobody, self._send)

    async def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, seconds: float
    ) -> tuple[int, bytes]:
        where = urlsplit(url)
        assert where.hostname is not None
        told = {name.lower(): value for name, value in headers.items()}
        answer = await call(
            self._apps[where.hostname], where.path, body or b"", method, headers=told
        )
        return answer.status, answer.content

    async def fetch(self, version: int, root_hash: str) -> CallFailure | None:
        """Stage (1, version) on the joiner, and return why that failed."""
        body = StageRequest(
            epoch=1,
            version=version,
            source=StageSource(pushed=PushedBytes()),
            root_hash=root_hash,
            deadline_seconds=20,
        )
        pod = a_pod(spec_of(), 1, uid="u", ip=JOINER)
        planned = CallWorker("u", pod.name, ControlVerb.STAGE, body, 30, peers=(GIVER,))
        assert self._workers.start_call(KEY, pod, planned)
        await until(
            lambda: self._calls.running_call("u/stage") is None, what="the end of the fetch"
        )
        return self._calls.call_failures("u/stage").get("stage")


async def _nobody() -> str | None:
    return None


async def test_a_joiner_gets_the_bytes_of_the_giver_and_keeps_them_for_the_next_one(
    tmp_path: Path,
) -> None:
    given = Version(7)
    async with pushed_worker(tmp_path / "a") as giver, pushed_worker(tmp_path / "b") as joiner:
        await push(giver, 1, given, "tcp")
        await giver.commit(1)
        operator = Operator(giver, joiner)
        assert await operator.fetch(1, given.root_hash) is None
        await joiner.commit(1)
        assert joiner.engine.active.number == 7
        assert joiner.updates.to_view().active == giver.updates.to_view().active
        assert joiner.updates.to_view().kept == giver.updates.to_view().kept


async def test_a_giver_that_has_moved_on_is_told_and_nothing_is_staged(tmp_path: Path) -> None:
    given = Version(7)
    async with pushed_worker(tmp_path / "a") as giver, pushed_worker(tmp_path / "b") as joiner:
        await push(giver, 2, given, "tcp")
        await giver.commit(2)
        operator = Operator(giver, joiner)
        failed = await operator.fetch(1, given.root_hash)
        assert failed is not None
        assert failed.problem == "no-copy"
        assert "this worker keeps (1, 2)" in failed.message
        assert joiner.updates.to_view().staged is None
        assert await operator.fetch(2, given.root_hash) is None
