"""A standby and a Lease that somebody deletes, against a server on loopback; the rest is in `tests/api`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from rollout_operator.kube import lease as leases
from rollout_operator.kube.kube_client import KubeClient
from rollout_operator.kube.lease import Leadership
from rollout_operator.kube.settings import LEASE_DURATION_SECONDS
from tests.support.loopback import Loopback
from tests.support.waiting import until

LEASES = "/apis/coordination.k8s.io/v1/namespaces/rl/leases"


class Standby:
    """One that looks all the time, and the Lease that it sees."""

    def __init__(self, server: Loopback, kube: KubeClient) -> None:
        self.now = 0.0
        self.lease: dict[str, Any] | None = None
        self.looks = 0
        self.leadership = Leadership(
            kube, namespace="rl", name="operator", identity="standby", clock=lambda: self.now
        )
        server.answers["GET", f"{LEASES}/operator"] = self._get
        server.answers["POST", LEASES] = self._make

    async def _get(self, request: web.Request) -> web.StreamResponse:
        self.looks += 1
        return web.json_response(self.lease, status=404 if self.lease is None else 200)

    async def _make(self, request: web.Request) -> web.StreamResponse:
        self.lease = {**await request.json(), "metadata": {"resourceVersion": "1"}}
        return web.json_response(self.lease, status=201)

    def renew(self, version: int) -> None:
        """The holder does."""
        spec = {"holderIdentity": "holder", "leaseDurationSeconds": LEASE_DURATION_SECONDS}
        self.lease = {"metadata": {"resourceVersion": str(version)}, "spec": spec}

    async def looked(self) -> None:
        """Wait until it has looked twice from now on."""
        wanted = self.looks + 2
        await until(lambda: self.looks >= wanted or self.leadership.has_lease(), what="a look")


@pytest.fixture
async def standby(api: Loopback, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Standby]:
    monkeypatch.setattr(leases, "STANDBY_POLL_SECONDS", 0.001)
    async with KubeClient() as kube:
        made = Standby(api, kube)
        kube.fence_with(made.leadership.write_seconds)
        yield made


async def test_a_lease_that_was_deleted_is_left_to_its_holder_for_as_long_as_it_lasts(
    standby: Standby,
) -> None:
    standby.renew(7)
    acquiring = asyncio.create_task(standby.leadership.acquire_lease())
    await standby.looked()
    standby.lease = None
    await standby.looked()
    standby.now += LEASE_DURATION_SECONDS - 1
    await standby.looked()
    assert not standby.leadership.has_lease(), "its holder may write still"
    standby.renew(8)  # it has created it anew
    await standby.looked()
    standby.lease = None
    await standby.looked()
    standby.now += LEASE_DURATION_SECONDS
    await standby.looked()
    assert not standby.leadership.has_lease()
    standby.now += 1
    await asyncio.wait_for(acquiring, 10)
    assert standby.leadership.may_write()


async def test_who_has_seen_no_lease_creates_it_at_once(standby: Standby) -> None:
    await asyncio.wait_for(standby.leadership.acquire_lease(), 10)
    assert standby.leadership.may_write()


async def test_who_may_not_use_leases_is_no_standby(
    standby: Standby, api: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be Ready, and helm's --wait end, with nobody who can lead; an outage passes by itself."""
    path, leadership = f"{LEASES}/operator", standby.leadership
    look = api.answers["GET", path]
    running = asyncio.create_task(leadership.acquire_lease())
    api.answer("GET", path, {"message": "no such role"}, 403)
    await until(lambda: "no such role" in (leadership.standby_problem or ""), what="the refusal")
    api.answer("GET", path, {"message": "later"}, 503)
    await until(lambda: leadership.standby_problem is None, what="the outage")
    api.answers["GET", path] = look
    await asyncio.wait_for(running, 5)
    assert leadership.standby_problem is None
