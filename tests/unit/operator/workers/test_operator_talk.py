"""The workers as a pass sees them: what is believed of each, who is polled, how a call goes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from rollout_client.worker_control import ControlUnreachable, WorkerControl
from rollout_operator.api.objects import PoolKey
from rollout_operator.core.observed_pool import ObservedWorker, Pod
from rollout_operator.core.pass_plan import CallBody, CallWorker, ControlVerb
from rollout_operator.workers import worker_clients
from rollout_operator.workers.head_poller import HeadPoller
from rollout_operator.workers.settings import STALE_FAILURE_SECONDS, STALE_STATE_SECONDS
from rollout_operator.workers.worker_calls import WorkerCalls
from rollout_operator.workers.worker_clients import WorkerClients, pod_control_address
from rollout_worker.schemas import (
    ActiveWeights,
    CommitRequest,
    Committed,
    OfferResponse,
    PauseRequest,
    Pushed,
    PushedBytes,
    ReleaseRequest,
    SleepRequest,
    StagedWeights,
    StageRequest,
    StageSource,
    WakeRequest,
    WeightsId,
    WeightsSource,
    WorkerState,
)
from tests.support.unit.poolspecs import a_pod, spec_of
from tests.support.unit.simworker import SimWorker
from tests.support.waiting import until

KEY = PoolKey("rl", "math")
SOURCE = WeightsSource(path="/w/1")
STAGE = StageRequest(epoch=1, version=1, source=StageSource.of(SOURCE))
COMMIT = CommitRequest(epoch=1, version=1)
ANSWER = SimWorker("b1", loading=False).state()


def pod(**fields: Any) -> Pod:
    return a_pod(spec_of(), 0, uid="u1", ip="10.0.0.1", **fields)


class Talk:
    """One worker, what it is asked, and what it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.now = 1000.0
        self.asked: list[tuple[str, str]] = []
        self.timeouts: list[float] = []
        self.down = False
        self.states: list[WorkerState] = [ANSWER]
        """What it says of itself, one after the other; the last one stays."""
        self.problem: tuple[int, str] | None = None
        self.offers: dict[str, OfferResponse | None] = {}
        """What the worker at an address offers; None: it keeps nothing of it."""
        self.bodies: list[dict[str, Any]] = []
        self.poller = HeadPoller(self._ask, lambda key: None, clock=lambda: self.now)
        self.calls = WorkerCalls(lambda key: None, clock=lambda: self.now)
        self.workers = WorkerClients(self.poller, self.calls, self._control)

    async def _ask(self, key: PoolKey, address: str) -> WorkerState:
        if self.down:
            raise ControlUnreachable("it is down")
        return self._next()

    def _next(self) -> WorkerState:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    def _control(self, key: PoolKey, address: str) -> WorkerControl:
        assert key == KEY
        return WorkerControl(f"http://{address}", _nobody, self._send)

    async def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, seconds: float
    ) -> tuple[int, bytes]:
        address, _, verb = url.removeprefix("http://").partition("/v1/")
        self.asked.append((address, verb))
        self.timeouts.append(seconds)
        if self.problem is not None:
            status, slug = self.problem
            told = {"type": f"urn:rollout:problem:{slug}", "detail": f"no: {slug}"}
            return status, json.dumps(told).encode()
        if verb == "weights/offer":
            offer = self.offers[address]
            if offer is None:
                return 409, b'{"type": "urn:rollout:problem:no-copy", "detail": "it keeps none"}'
            return 200, offer.model_dump_json().encode()
        state = self._next()
        if body is not None:
            self.bodies.append(json.loads(body))
        if verb == "weights/commit":
            done = Committed(
                active=ActiveWeights(epoch=1, version=1), previous=None, commit_seq=1,
                pause_seconds=0, finished=0, aborted=0, kept=0, state=state,
            )  # fmt: skip
            return 200, done.model_dump_json().encode()
        if verb == "weights/stage":
            assert state.weights.staged is not None
            return 200, state.weights.staged.model_dump_json().encode()
        return 200, state.model_dump_json().encode()

    async def polled(self, times: int = 1) -> None:
        for _ in range(times):
            await self.poller._poll_head("u1")

    def known(self) -> ObservedWorker:
        return self.workers.observe_worker(pod())

    async def call(self, verb: ControlVerb, body: CallBody, seconds: float = 5) -> ObservedWorker:
        """Make a call and return what is known after its end."""
        planned = CallWorker("u1", "math-0-0", verb, body, seconds)
        assert self.workers.start_call(KEY, pod(), planned)
        lane = "u1/stage" if verb is ControlVerb.STAGE else "u1"
        assert self.calls.running_call(lane) == verb
        assert self.known().running == {verb}
        await until(lambda: self.calls.running_call(lane) is None, what="the end of the call")
        return self.known()


async def _nobody() -> str | None:
    return None


@pytest.fixture
async def lab(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Talk]:
    monkeypatch.setattr(worker_clients, "STAGE_LOOK_SECONDS", 0.001)
    made = Talk(monkeypatch)
    yield made
    await made.calls.cancel_all()


def staging(phase: str, version: int = 1, **failed: str | None) -> WorkerState:
    staged = StagedWeights.model_validate(
        {"epoch": 1, "version": version, "source": SOURCE, "phase": phase, **failed}
    )
    weights = ANSWER.weights.model_copy(update={"staged": staged})
    return ANSWER.model_copy(update={"weights": weights})


async def test_an_answer_that_brings_the_state_saves_the_look_after_it(lab: Talk) -> None:
    lab.calls = WorkerCalls(
        lambda key: None, after=lambda lane, a: lab.workers.note_call_end(lane, a)
    )
    lab.workers = WorkerClients(lab.poller, lab.calls, lab._control)
    lab.workers.watch_heads(KEY, [pod()], set())
    for verb, body, path in (
        (ControlVerb.PAUSE, PauseRequest(), "pause"),
        (ControlVerb.COMMIT, COMMIT, "weights/commit"),
    ):
        lab.asked.clear()
        lab.states = [ANSWER.model_copy(update={"boot_id": path})]
        known = await lab.call(verb, body)
        assert lab.asked == [("10.0.0.1:8001", path)]
        assert known.state is not None
        assert known.state.boot_id == path


# What is believed.


async def test_of_who_was_never_asked_nothing_is_known(lab: Talk) -> None:
    assert lab.known() == ObservedWorker()
    lab.workers.watch_heads(KEY, [pod()], set())
    assert lab.known() == ObservedWorker()


async def test_one_missed_poll_is_no_silence_and_two_are(lab: Talk) -> None:
    lab.workers.watch_heads(KEY, [pod()], set())
    await lab.polled()
    assert (lab.known().state, lab.known().last, lab.known().error) == (ANSWER, ANSWER, None)
    lab.down = True
    await lab.polled()
    assert (lab.known().state, lab.known().error) == (ANSWER, "it is down")
    await lab.polled()
    assert (lab.known().state, lab.known().last, lab.known().error) == (None, ANSWER, "it is down")


async def test_an_answer_of_long_ago_is_not_believed(lab: Talk) -> None:
    lab.workers.watch_heads(KEY, [pod()], set())
    await lab.polled()
    lab.now += STALE_STATE_SECONDS + 1
    assert (lab.known().state, lab.known().last) == (None, ANSWER)


# Who is polled.


@pytest.mark.parametrize(
    ("fields", "polled"),
    [
        ({}, True),
        ({"ip": None}, False),
        ({"started": False}, False),
        ({"phase": "Failed"}, False),
    ],
)
async def test_who_can_answer_is_polled(lab: Talk, fields: dict[str, Any], polled: bool) -> None:
    head = a_pod(spec_of(), 0, **({"uid": "u1", "ip": "10.0.0.1"} | fields))
    assert lab.workers.watch_heads(KEY, [head], {"u1"}) == (
        frozenset({"u1"}) if polled else frozenset()
    )
    assert ("u1" in lab.poller._heads) is polled
    assert ("u1" in lab.poller._fast) is polled


@pytest.mark.parametrize(
    ("ip", "address"), [("10.0.0.1", "10.0.0.1:8001"), ("fd00::1", "[fd00::1]:8001")]
)
def test_the_address_of_a_control_port(ip: str, address: str) -> None:
    assert pod_control_address(a_pod(spec_of(), 0, ip=ip)) == address


async def test_who_is_gone_is_forgotten_with_its_calls_and_failures(lab: Talk) -> None:
    lab.workers.watch_heads(KEY, [pod()], set())
    await lab.polled()
    lab.problem = (409, "stale-epoch")
    for verb, body in ((ControlVerb.STAGE, STAGE), (ControlVerb.COMMIT, COMMIT)):
        assert set((await lab.call(verb, body)).failures) >= {verb}
    lab.workers.forget_head("u1")
    assert lab.known() == ObservedWorker()


# Calls.


@pytest.mark.parametrize(
    ("verb", "body", "seconds"),
    [
        (ControlVerb.RESUME, ReleaseRequest(), 120),
        (ControlVerb.WAKE, WakeRequest(), 5),
        (ControlVerb.SLEEP, SleepRequest(), 5),
        (ControlVerb.COMMIT, COMMIT, 5),
    ],
)
async def test_a_call_says_what_failed(
    lab: Talk, verb: ControlVerb, body: CallBody, seconds: float
) -> None:
    lab.problem = (503, "engine-refused")
    known = await lab.call(verb, body)
    assert [address for address, _ in lab.asked] == ["10.0.0.1:8001"]
    assert lab.timeouts == [seconds]
    error = known.failures[verb]
    assert (error.message, error.count, error.slug) == ("no: engine-refused", 1, "engine-refused")
    assert error.retry_in == 1.0
    about = WeightsId(epoch=1, version=1) if verb is ControlVerb.COMMIT else None
    assert error.about == about
    assert known.running == frozenset()


@pytest.mark.parametrize("verb", [ControlVerb.RESUME, ControlVerb.WAKE, ControlVerb.SLEEP])
async def test_a_hold_of_others_is_no_failure_of_ours(lab: Talk, verb: ControlVerb) -> None:
    lab.problem = (409, "held")
    bodies: dict[ControlVerb, CallBody] = {
        ControlVerb.RESUME: ReleaseRequest(),
        ControlVerb.WAKE: WakeRequest(),
        ControlVerb.SLEEP: SleepRequest(),
    }
    known = await lab.call(verb, bodies[verb])
    assert (verb in known.failures) is (verb is ControlVerb.SLEEP)


async def test_what_nobody_tries_again_is_told_for_a_minute_unless_it_is_about_weights(
    lab: Talk,
) -> None:
    lab.problem = (503, "busy")
    await lab.call(ControlVerb.SLEEP, SleepRequest())
    await lab.call(ControlVerb.COMMIT, COMMIT)
    lab.now += 1 + STALE_FAILURE_SECONDS - 0.5
    assert set(lab.known().failures) == {"sleep", "commit"}
    lab.now += 1
    assert set(lab.known().failures) == {"commit"}


async def test_staging_and_another_call_run_side_by_side(lab: Talk) -> None:
    lab.states = [staging("Staging")]
    assert lab.workers.start_call(KEY, pod(), CallWorker("u1", "p", ControlVerb.STAGE, STAGE, 60))
    assert not lab.workers.start_call(
        KEY, pod(), CallWorker("u1", "p", ControlVerb.STAGE, STAGE, 60)
    )
    assert lab.workers.start_call(
        KEY, pod(), CallWorker("u1", "p", ControlVerb.SLEEP, SleepRequest(), 60)
    )
    assert lab.known().running == {"stage", "sleep"}


# Staging, which a worker does by itself.


async def test_a_stage_is_followed_to_its_end_and_the_worker_is_looked_at(lab: Talk) -> None:
    lab.workers.watch_heads(KEY, [pod()], set())
    refreshed: list[str] = []

    async def refresh(uid: str) -> None:
        refreshed.append(uid)

    lab.monkeypatch.setattr(lab.poller, "refresh_state", refresh)
    lab.states = [staging("Staging"), staging("Staging"), staging("Staged")]
    known = await lab.call(ControlVerb.STAGE, STAGE)
    assert [verb for _, verb in lab.asked] == ["weights/stage", "state", "state"]
    assert known.failures == {}
    assert refreshed == ["u1"], "the next pass sees what it did"


async def staging_for_long(lab: Talk) -> None:
    """Let a stage call come to wait for polls."""
    lab.monkeypatch.setattr(worker_clients, "STAGE_LOOK_SECONDS", 1.0)
    lab.workers.watch_heads(KEY, [pod()], set())
    lab.states = [staging("Staging")]
    call = CallWorker("u1", "math-0-0", ControlVerb.STAGE, STAGE, 60)
    assert lab.workers.start_call(KEY, pod(), call)
    await waits_for_poll(lab)


async def waits_for_poll(lab: Talk) -> None:
    await until(lambda: lab.poller._heads["u1"].waiters, what="a wait for the next poll")


async def ended(lab: Talk) -> ObservedWorker:
    await until(lambda: lab.calls.running_call("u1/stage") is None, what="the end of the call")
    return lab.known()


async def test_a_long_stage_is_followed_by_the_polls(lab: Talk) -> None:
    await staging_for_long(lab)
    await lab.polled()
    await waits_for_poll(lab)
    lab.states = [staging("Staged")]
    await lab.polled()
    await waits_for_poll(lab)  # the look after it
    await lab.polled()
    assert (await ended(lab)).failures == {}
    assert [verb for _, verb in lab.asked] == ["weights/stage"], "the call itself asks nothing"


async def test_a_long_stage_that_fails_is_the_calls_failure(lab: Talk) -> None:
    await staging_for_long(lab)
    lab.states = [staging("Failed", error="no room")]
    await lab.polled()
    assert (await ended(lab)).failures["stage"].message == "no room"


async def test_one_missed_poll_fails_no_stage_and_two_do(lab: Talk) -> None:
    await staging_for_long(lab)
    lab.down = True
    await lab.polled()
    await waits_for_poll(lab)
    await lab.polled()
    known = await ended(lab)
    assert known.failures["stage"].message == "while it staged weights: it is down"


@pytest.mark.parametrize("address", [None, "10.0.0.9"])
async def test_a_stage_of_who_is_polled_no_more_ends_and_is_no_failure(
    lab: Talk, address: str | None
) -> None:
    await staging_for_long(lab)
    if address is None:
        lab.poller.unwatch_head("u1")
    else:
        lab.poller.watch_head(KEY, "u1", address, fast=False)
        await waits_for_poll(lab)  # the look after it
        await lab.polled()
    assert (await ended(lab)).failures == {}


@pytest.mark.parametrize(
    ("error", "slug", "said", "told"),
    [
        ("a tensor is missing", None, "a tensor is missing", "stage-failed"),
        ("rank 1 found other bytes", "content-mismatch", "rank 1 found", "content-mismatch"),
        (None, None, "gave no reason", "stage-failed"),
    ],
)
async def test_a_stage_that_fails_is_the_calls_failure(
    lab: Talk,
    error: str | None,
    slug: str | None,
    said: str,
    told: str,
) -> None:
    lab.states = [staging("Staging"), staging("Failed", error=error, slug=slug)]
    known = await lab.call(ControlVerb.STAGE, STAGE)
    assert said in known.failures["stage"].message
    assert known.failures["stage"].slug == told
    assert known.failures["stage"].about == WeightsId(epoch=1, version=1)


# Pushed weights, which one worker fetches from others.

PUSHED = StageRequest(epoch=1, version=1, source=StageSource(pushed=PushedBytes()), root_hash="r")


def an_offer(ticket: str, root_hash: str = "r") -> OfferResponse:
    return OfferResponse(
        ticket=ticket * 32, port=8002, layout_id="xxh3_128:1", bytes=512, root_hash=root_hash
    )


async def fetch(lab: Talk, *peers: str) -> ObservedWorker:
    planned = CallWorker("u1", "math-0-0", ControlVerb.STAGE, PUSHED, 5, peers=peers)
    assert lab.workers.start_call(KEY, pod(), planned)
    await until(lambda: lab.calls.running_call("u1/stage") is None, what="the end of the fetch")
    return lab.known()


def staged_by_push(phase: str) -> WorkerState:
    staged = StagedWeights.model_validate(
        {"epoch": 1, "version": 1, "source": WeightsSource(pushed=Pushed()), "phase": phase}
    )
    return ANSWER.model_copy(
        update={"weights": ANSWER.weights.model_copy(update={"staged": staged})}
    )


async def test_members_are_asked_for_tickets_and_the_joiner_is_told_of_those_that_give(
    lab: Talk,
) -> None:
    lab.states = [staged_by_push("Staged")]
    lab.offers = {
        "10.0.0.2:8001": an_offer("a"),
        "10.0.0.3:8001": None,
        "10.0.0.4:8001": an_offer("b", root_hash="other bytes"),
        "[fd00::5]:8001": an_offer("c"),
    }
    known = await fetch(lab, "10.0.0.2", "10.0.0.3", "10.0.0.4", "fd00::5")
    assert known.failures == {}
    [body] = lab.bodies
    assert body["root_hash"] == "r"
    assert body["source"]["pushed"] == {
        "layout_id": "xxh3_128:1",
        "bytes": 512,
        "peers": [
            {"host": "10.0.0.2", "port": 8002, "ticket": "a" * 32},
            {"host": "fd00::5", "port": 8002, "ticket": "c" * 32},
        ],
    }


async def test_a_fetch_that_nobody_gives_for_is_a_failure_and_the_next_one_asks_anew(
    lab: Talk,
) -> None:
    lab.offers = {"10.0.0.2:8001": None}
    known = await fetch(lab, "10.0.0.2")
    failed = known.failures["stage"]
    assert (failed.slug, failed.about) == ("no-copy", WeightsId(epoch=1, version=1))
    assert failed.message == (
        "no replica gives weights (1, 1): 10.0.0.2: 409 no-copy: it keeps none"
    )
    assert lab.bodies == [], "nothing was staged"
    lab.states = [staged_by_push("Staged")]
    lab.offers = {"10.0.0.2:8001": an_offer("d")}
    assert (await fetch(lab, "10.0.0.2")).failures == {}


async def test_it_is_known_for_how_long_a_slot_has_held_the_same(lab: Talk) -> None:
    lab.workers.watch_heads(KEY, [pod()], set())
    seen = []
    for state in (ANSWER, staging("Staging"), staging("Staged"), staging("Staged"), ANSWER):
        lab.states = [state]
        await lab.polled()
        lab.now += 1.0
        seen.append(lab.known().slot_seconds)
    assert seen == [0.0, 1.0, 1.0, 2.0, 0.0]


@pytest.mark.parametrize("after", [ANSWER, staging("Staging", version=2)], ids=["none", "others"])
async def test_a_stage_that_somebody_ended_is_no_failure(lab: Talk, after: WorkerState) -> None:
    lab.states = [staging("Staging"), after]
    assert (await lab.call(ControlVerb.STAGE, STAGE)).failures == {}
