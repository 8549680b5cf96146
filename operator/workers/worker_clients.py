"""The workers as a pass sees them: what each one said last, and the calls that are made to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, replace

from rollout_client.worker_control import ControlError, ControlUnreachable, WorkerControl
from rollout_common import tracing
from rollout_common.kube.errors import KubeError
from rollout_common.wire import (
    CommitRequest,
    Committed,
    DiscardRequest,
    OfferRequest,
    Peer,
    PushedBytes,
    StagedWeights,
    StageRequest,
    StageSource,
    WorkerState,
)
from rollout_operator.api import names
from rollout_operator.api.objects import PoolKey
from rollout_operator.core.observed_pool import ObservedWorker, Pod
from rollout_operator.core.pass_plan import CallWorker, ControlVerb

from .head_poller import HeadPoller
from .settings import FAST_POLL_SECONDS, STAGE_LOOK_SECONDS, STALE_FAILURE_SECONDS
from .worker_calls import WorkerCalls


@dataclass(frozen=True, slots=True)
class WorkerClients:
    """All workers of all pools, by the uid of their head pod.

    `control` makes the client of a worker's control port from the pool and `host:port`.
    """

    poller: HeadPoller
    calls: WorkerCalls
    control: Callable[[PoolKey, str], WorkerControl]

    def observe_worker(self, pod: Pod) -> ObservedWorker:
        """What is known of a head; one missed poll is not taken for silence."""
        seen = self.poller.last_observation(pod.uid)
        believed = seen is not None and not seen.stale and seen.failures < 2
        call_keys = (pod.uid, make_call_key(pod.uid, ControlVerb.STAGE))
        running = frozenset(
            name for call_key in call_keys if (name := self.calls.running_call(call_key))
        )
        failures = {
            verb: failed
            for call_key in call_keys
            for verb, failed in self.calls.call_failures(call_key).items()
            if failed.about is not None
            or verb in running
            or failed.retry_in > -STALE_FAILURE_SECONDS
        }
        return ObservedWorker(
            state=seen.state if seen is not None and believed else None,
            error=seen.error if seen is not None else None,
            running=running,
            failures=failures,
            last=seen.state if seen is not None else None,
            slot_seconds=seen.slot_seconds if seen is not None else 0.0,
            silent_since=seen.silent_since if seen is not None else None,
            silent_seconds=seen.silent_seconds if seen is not None else 0.0,
        )

    def watch_heads(
        self, key: PoolKey, heads: Iterable[Pod], fast: Collection[str]
    ) -> frozenset[str]:
        """Poll these heads from now on, those in `fast` often; returns the uids that are polled."""
        uids = set()
        for pod in heads:
            if pod.ip and pod.started and not pod.is_finished:
                self.poller.watch_head(key, pod.uid, pod_control_address(pod), pod.uid in fast)
                uids.add(pod.uid)
        return frozenset(uids)

    def forget_head(self, uid: str) -> None:
        """Drop everything about a head that is gone."""
        self.poller.unwatch_head(uid)
        for verb in ControlVerb:
            self.calls.forget_calls(make_call_key(uid, verb))

    def start_call(self, key: PoolKey, pod: Pod, call: CallWorker) -> bool:
        """Start a planned call; its end wakes the pool."""
        worker = self.control(key, pod_control_address(pod))
        attributes = {"rollout.pool": key.name, "k8s.pod.name": pod.name}

        async def make() -> object:
            with tracing.open_span(
                call.verb, "client", parent=_trace_context(key, call), attributes=attributes
            ):
                planned = await self._with_peers(key, call) if call.peers else call
                if not isinstance(planned.body, StageRequest):
                    return await _send_call(worker, planned)
                await self._stage_and_wait(worker, call.uid, planned.body)
            # Other calls refresh the view of their worker by themselves: their key is the pod.
            await self.poller.refresh_state(call.uid)
            return None

        return self.calls.start_call(
            key,
            make_call_key(call.uid, call.verb),
            call.verb,
            make,
            call.deadline_seconds,
            call.about,
            instead_of=call.instead_of,
        )

    async def note_call_end(self, call_key: str, answer: object) -> None:
        """Learn what a call did: from the state in its answer, else by a look at the worker."""
        state = answer.state if isinstance(answer, Committed) else answer
        if isinstance(state, WorkerState):
            self.poller.note_state(call_key, state)
        else:
            await self.poller.refresh_state(call_key)

    async def _stage_and_wait(self, worker: WorkerControl, uid: str, request: StageRequest) -> None:
        """Stage and wait until it is done, so that its failure counts as the call's.

        What takes longer than a moment is seen by the polls, whose rate is bounded for all heads together.
        """
        staged: StagedWeights | None = await worker.stage(request)
        pause = STAGE_LOOK_SECONDS
        while staged is not None and _is_same_stage(staged, request):
            if staged.phase == "Failed":
                why = staged.error or "the worker gave no reason"
                raise ControlError(409, staged.slug or "stage-failed", why)
            if staged.phase == "Staged":
                return
            if pause < FAST_POLL_SECONDS:
                await asyncio.sleep(pause)
                pause *= 2
                staged = (await worker.state()).weights.staged
                continue
            seen = await self.poller.wait_for_poll(uid)
            if seen is None:
                return  # of a pool that can't be read: what is in the slot then is for a later pass
            if seen.failures > 1:
                raise ControlUnreachable(f"while it staged weights: {seen.error}")
            if seen.state is not None and not seen.failures:
                staged = seen.state.weights.staged

    async def _with_peers(self, key: PoolKey, call: CallWorker) -> CallWorker:
        """Return the stage with peers to fetch from: each is asked for a ticket, good for one fetch."""
        assert isinstance(call.body, StageRequest), "only weights are fetched"
        body = call.body
        asked = OfferRequest(epoch=body.epoch, version=body.version)
        controls = [self.control(key, _control_address(ip)) for ip in call.peers]
        answers = await asyncio.gather(
            *(each.offer(asked) for each in controls), return_exceptions=True
        )
        offers = []
        for ip, answer in zip(call.peers, answers, strict=True):
            if not isinstance(answer, BaseException):
                offers.append((ip, answer))
            elif not isinstance(answer, ControlError | ControlUnreachable | KubeError):
                raise answer
        wanted = body.root_hash or (offers[0][1].root_hash if offers else None)
        same = [(ip, offer) for ip, offer in offers if offer.root_hash == wanted]
        if not same:
            told = "; ".join(
                f"{ip}: {answer}" for ip, answer in zip(call.peers, answers, strict=True)
            )
            what = f"no replica gives weights ({body.epoch}, {body.version}): {told}"
            raise ControlError(409, "no-copy", what)
        peers = tuple(Peer(host=ip, port=o.port, ticket=o.ticket) for ip, o in same)
        first = same[0][1]
        pushed = PushedBytes(layout_id=first.layout_id, bytes=first.bytes, peers=peers)
        change = {"source": StageSource(pushed=pushed), "root_hash": wanted}
        return replace(call, body=body.model_copy(update=change))


def _trace_context(key: PoolKey, call: CallWorker) -> dict[str, str]:
    """Return the context of a call: the update that it belongs to, else none."""
    if not isinstance(call.body, StageRequest | CommitRequest | DiscardRequest):
        return {}
    identity = call.body.epoch, call.body.version
    return tracing.update_ids(key.namespace, key.name, *identity).to_headers()


def make_call_key(uid: str, verb: ControlVerb) -> str:
    """Return the key of a call: staging has its own, so that sleep need not wait for it."""
    return f"{uid}/stage" if verb is ControlVerb.STAGE else uid


def pod_control_address(pod: Pod) -> str:
    """Control port of a pod."""
    return _control_address(pod.ip)


def _control_address(ip: str | None) -> str:
    host = f"[{ip}]" if ip and ":" in ip else ip
    return f"{host}:{names.CONTROL_PORT}"


def _is_same_stage(staged: StagedWeights, request: StageRequest) -> bool:
    return (staged.epoch, staged.version) == (request.epoch, request.version)


async def _send_call(worker: WorkerControl, call: CallWorker) -> object:
    send: Callable[..., Awaitable[object]] = getattr(worker, call.verb.value)
    is_quick = call.verb in (ControlVerb.REQUIRE, ControlVerb.DISCARD, ControlVerb.RESUME)
    limit = {} if is_quick else {"timeout": call.deadline_seconds}
    try:
        return await send(call.body, **limit)
    except ControlError as error:
        # Our hold is released; the worker's state says who else still holds it.
        if error.slug != "held" or call.verb not in (ControlVerb.RESUME, ControlVerb.WAKE):
            raise
        return None
