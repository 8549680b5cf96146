"""A process that has just started decides nothing about a pool before it has heard its workers, however many there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollout_operator.passes.settings import FIRST_POLLS_SECONDS
from rollout_operator.workers.head_poller import HeadPoller
from tests.support.unit.passlab import KEY, PassLab, address_of, head, pass_lab
from tests.support.unit.simworker import SimWorker


@pytest_asyncio.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PassLab]:
    async with pass_lab(tmp_path, monkeypatch) as made:
        made.has_pool()
        made.has_pod(head(), SimWorker("b0"))
        yield made


async def test_while_others_give_their_first_answers_a_pool_waits_for_its_own(
    lab: PassLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heads stand in line behind thousands of other pools'."""
    answered = 0.0
    monkeypatch.setattr(HeadPoller, "seconds_since_first_poll", lambda self: answered)
    for _ in range(10):
        left = await lab.reconcile()
        assert left is not None
        assert 0 < left <= FIRST_POLLS_SECONDS
        lab.clock.steady += FIRST_POLLS_SECONDS
    assert not lab.written
    assert not lab.pod_writes
    answered = FIRST_POLLS_SECONDS  # nobody answers any more: its own won't, either
    await lab.reconcile()
    assert lab.written


async def test_the_poller_knows_when_a_first_poll_ended(lab: PassLab) -> None:
    """An answer and a silence count, each once for a head."""
    poller = lab.poller
    assert poller.seconds_since_first_poll() == float("inf")
    lab.workers.clear()  # it does not answer
    poller.watch_head(KEY, "one", address_of(head()), fast=False)
    await lab.polled()
    since = poller.seconds_since_first_poll()
    assert since < 60
    await asyncio.sleep(0.01)
    await lab.polled()
    assert poller.seconds_since_first_poll() > since, "the second poll of the same head"
