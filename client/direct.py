"""Weights and state of a pool without an operator: the control ports are called one by one.

It comes to what the operator does. All live replicas stage; when all have, all commit; who died
meanwhile, sleeps or fails to commit is fenced and gets the weights before it serves again
(`Keeper`). Before the first commit a failure leaves the old weights serving everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import httpx

from rollout_worker.schemas import (
    CommitRequest,
    CommitResponse,
    DiscardRequest,
    InFlightPolicy,
    MemoryTag,
    OnDeadline,
    PauseRequest,
    RequireRequest,
    SleepRequest,
    StageRequest,
    WakeRequest,
    WeightsId,
    WeightsSource,
    WorkerState,
)

from .control import ControlError, ControlUnreachable, WorkerControl
from .errors import EpochLost, PublishFailed, SteeringFailed
from .members import Member
from .steering import OnProgress, PoolState, Published, PublishProgress

logger = logging.getLogger(__name__)

T = TypeVar("T")
Token = str | Callable[[], str | None] | None

POLL_SECONDS = 0.1
KEEP_SECONDS = 1.0
"""Between two looks at replicas that lack the pool's weights."""

SEED_SECONDS = 600.0
"""What staging on one of them may take."""

DEAD_SECONDS = 5.0
"""A replica that does not answer for so long while it stages leaves the barrier."""


@dataclass(frozen=True, slots=True)
class DirectOptions:
    """How a pool without an operator is steered.

    Attributes:
        token: Bearer token of the control ports, or a function that returns it.
        in_flight: What a commit does to running requests.
        drain_seconds: What running requests get before a commit, a sleep or a pause.
        on_deadline: What happens to those that still run then.
        sleep_level: 1 keeps a copy of the weights, 2 drops them.
    """

    token: Token = None
    in_flight: InFlightPolicy = "Drain"
    drain_seconds: float = 30.0
    on_deadline: OnDeadline = "Abort"
    sleep_level: int = 1

    def __post_init__(self) -> None:
        # Once weights are staged it is too late to find that no worker takes these.
        self.commit(WeightsId(epoch=0, version=0))
        self.sleep()

    def commit(self, identity: WeightsId) -> CommitRequest:
        """Return the order to flip to staged weights."""
        return CommitRequest(
            epoch=identity.epoch,
            version=identity.version,
            in_flight=self.in_flight,
            deadline_seconds=self.drain_seconds,
            on_deadline=self.on_deadline,
        )

    def sleep(self) -> SleepRequest:
        """Return the order to fall asleep."""
        return SleepRequest.model_validate(
            {"level": self.sleep_level, "deadline_seconds": self.drain_seconds}
        )


@dataclass(frozen=True, slots=True)
class Version:
    """Weights as they are staged."""

    identity: WeightsId
    source: WeightsSource


@dataclass(slots=True)
class _Barrier:
    """Replicas that stage, and who has left."""

    waiting: dict[str, float] = field(default_factory=dict)
    """By name: when it answered last."""
    staged: dict[str, str | None] = field(default_factory=dict)
    """By name: its root hash."""


class DirectSteering:
    """See the module.

    Args:
        members: Who is there now.
        options: See there.
        on_weights: Told that a member (by URL) serves an identity.
    """

    def __init__(
        self,
        members: Callable[[], Sequence[Member]],
        options: DirectOptions,
        on_weights: Callable[[str, WeightsId], None] = lambda url, identity: None,
    ) -> None:
        self.target: Version | None = None
        """What every replica must come to serve."""
        self._members = members
        self._options = options
        self._on_weights = on_weights
        self._http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), trust_env=False)
        self._wanted: PoolState | None = None
        self._lock = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Close all connections."""
        await self._stop_keeping()
        await self._http.aclose()

    @property
    def floor(self) -> WeightsId | None:
        """What was published last: a replica that came back with older weights gets nothing."""
        return None if self.target is None else self.target.identity

    async def state(self) -> PoolState | None:
        """The state that was asked for last through this pool."""
        return self._wanted

    # Epoch.

    async def acquire(self, seconds: float) -> int:
        """Take the epoch above all that the workers have seen, and fence the lower ones.

        Without an API server there is nothing to compare and swap on: two trainers that do this
        at the same moment may both win, so a pool without an operator must have one trainer.

        Raises:
            EpochLost: A worker saw a higher epoch meanwhile.
            SteeringFailed: No worker answers.
        """
        try:
            async with asyncio.timeout(seconds):
                states = await self._states()
                epoch = 1 + max(_highest_epoch(state) for state in states.values())
                request = RequireRequest(epoch=epoch)
                answers = await self._on_all(list(states), lambda c: c.require(request))
        except TimeoutError:
            raise SteeringFailed(f"no epoch was had within {seconds:g} s") from None
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                raise EpochLost(answer.detail, replica=name)
        return epoch

    # Weights.

    async def publish(
        self, identity: WeightsId, source: WeightsSource, seconds: float, tell: OnProgress
    ) -> Published:
        """Stage on all live replicas, then commit on all.

        Raises:
            PublishFailed: Nothing changed: a replica can't use the weights, or time was over.
            EpochLost: A newer trainer owns a worker.
        """
        began = time.monotonic()
        version = Version(identity, source)
        await self._stop_keeping()
        try:
            async with self._lock:
                states = await self._states()
                live = [name for name, state in states.items() if state.resident.weights]
                barrier = _Barrier(waiting=dict.fromkeys(live, began))
                await self._stage_or_discard(version, barrier, seconds, tell)
                return await self._commit(version, barrier, len(states), began, tell)
        finally:
            # Also after a failure: who comes back needs the weights of before.
            self._keep()

    async def _stage_or_discard(
        self, version: Version, barrier: _Barrier, seconds: float, tell: OnProgress
    ) -> None:
        live = list(barrier.waiting)
        try:
            async with asyncio.timeout(seconds):
                await self._stage(version, barrier, seconds, tell)
        except TimeoutError:
            waits = ", ".join(sorted(barrier.waiting)) or "nobody"
            await self._discard(version, live)
            why = f"weights {version.identity} were not staged within {seconds:g} s"
            raise PublishFailed(f"{why}: {waits} had not") from None
        except BaseException:
            await self._discard(version, live)
            raise

    async def _stage(
        self, version: Version, barrier: _Barrier, seconds: float, tell: OnProgress
    ) -> None:
        request = StageRequest(
            epoch=version.identity.epoch,
            version=version.identity.version,
            source=version.source,
            deadline_seconds=seconds,
        )
        total = len(barrier.waiting)
        answers = await self._on_all(list(barrier.waiting), lambda c: c.stage(request))
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                raise _refused(name, version, answer)
        while True:
            done = len(barrier.staged)
            message = f"staging weights {version.identity}: {done} of {total} replicas have"
            tell(PublishProgress("Staging", done, total, message))
            if not barrier.waiting:
                return
            await asyncio.sleep(POLL_SECONDS)
            await self._look(version, barrier)

    async def _look(self, version: Version, barrier: _Barrier) -> None:
        """Ask those that stage how far they are."""
        answers = await self._on_all(list(barrier.waiting), lambda c: c.state())
        now = time.monotonic()
        for name, state in answers.items():
            if isinstance(state, ControlUnreachable):
                if now - barrier.waiting[name] > DEAD_SECONDS:
                    logger.warning("%s left the barrier: %s", name, state)
                    del barrier.waiting[name]
                continue
            if isinstance(state, ControlError):
                raise _refused(name, version, state)
            barrier.waiting[name] = now
            self._progress(name, state, version, barrier)

    def _progress(self, name: str, state: WorkerState, version: Version, barrier: _Barrier) -> None:
        slot, active = state.weights.staged, state.weights.active
        if active is not None and active.identity == version.identity:
            barrier.staged[name] = active.root_hash
            del barrier.waiting[name]
        elif slot is None or WeightsId(epoch=slot.epoch, version=slot.version) != version.identity:
            logger.warning("%s left the barrier: it was restarted", name)
            del barrier.waiting[name]
        elif slot.phase == "Failed":
            why = slot.error or "it names no reason"
            raise PublishFailed(f"weights {version.identity} can't be used: {why}", replica=name)
        elif slot.phase == "Staged":
            barrier.staged[name] = slot.root_hash
            del barrier.waiting[name]

    async def _discard(self, version: Version, names: Sequence[str]) -> None:
        request = DiscardRequest(**version.identity.model_dump())
        await self._on_all(names, lambda c: c.discard(request))

    async def _commit(
        self, version: Version, barrier: _Barrier, total: int, began: float, tell: OnProgress
    ) -> Published:
        """Commit on all that staged: from here it only goes forward."""
        hashes = set(barrier.staged.values())
        if len(hashes) > 1:
            await self._discard(version, list(barrier.staged))
            raise PublishFailed(f"the bytes at {version.source.path} differ between replicas")
        count = len(barrier.staged)
        message = f"committing weights {version.identity} on {count} replicas"
        tell(PublishProgress("Committing", 0, count, message))
        try:
            order = self._options.commit(version.identity)
            answers = await self._on_all(list(barrier.staged), lambda c: c.commit(order))
        except BaseException:
            # Cancelled: some may have flipped, so the others must.
            self.target = version
            raise
        done = {n: a for n, a in answers.items() if isinstance(a, CommitResponse)}
        errors = {n: a for n, a in answers.items() if isinstance(a, ControlError)}
        if errors and len(errors) == len(answers):
            await self._discard(version, list(answers))
            name, error = next(iter(errors.items()))
            raise _refused(name, version, error)
        self.target = version
        await self._fence(version)
        self._note(done, version)
        late = total - len(done)
        message = f"{len(done)} of {total} replicas serve weights {version.identity}"
        if late:
            message += f"; {late} get them before they serve again"
        tell(PublishProgress("Complete", len(done), total, message))
        return Published(
            identity=version.identity,
            root_hash=next(iter(hashes), None),
            replicas=len(done),
            seconds=time.monotonic() - began,
            pause_seconds=max((a.pause_seconds for a in done.values()), default=None),
            message=message,
        )

    async def _fence(self, version: Version) -> None:
        """Let nobody serve older weights: who missed the commit, who sleeps."""
        floor = RequireRequest(epoch=version.identity.epoch, min_version=version.identity.version)
        await self._on_all(list(self._controls()), lambda c: c.require(floor))

    def _note(self, names: Mapping[str, object], version: Version) -> None:
        for member in self._members():
            if member.name in names:
                self._on_weights(member.url, version.identity)

    # Those who lack the pool's weights.

    async def _stop_keeping(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    def _keep(self) -> None:
        if self._keeper is None and self.target is not None and not self._http.is_closed:
            self._keeper = asyncio.create_task(self._keep_all(), name="keeper of weights")

    async def _keep_all(self) -> None:
        """Bring the target to replicas that came, came back or woke with other weights."""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            async with self._lock:
                version = self.target
                if version is not None:
                    answers = await self._on_all(
                        list(self._controls()), partial(self._seed, version)
                    )
                    self._note({n: a for n, a in answers.items() if a is True}, version)
                    for name, answer in answers.items():
                        if isinstance(answer, ControlError):
                            logger.warning("%s lacks weights: %s", name, answer)

    async def _seed(self, version: Version, control: WorkerControl) -> bool:
        """Give one replica the target if it has older weights; whether it was given."""
        state = await control.state()
        active = state.weights.active
        if active is None or not state.resident.weights or active.identity >= version.identity:
            return False
        identity = version.identity
        await control.require(RequireRequest(epoch=identity.epoch, min_version=identity.version))
        slot = await control.stage(
            StageRequest(epoch=identity.epoch, version=identity.version, source=version.source)
        )
        until = time.monotonic() + SEED_SECONDS
        while slot.phase == "Staging" and time.monotonic() < until:
            await asyncio.sleep(POLL_SECONDS)
            slot = (await control.state()).weights.staged or slot
        if slot.phase != "Staged":
            raise ControlError(409, "stage-failed", slot.error or "it was not staged in time")
        await control.commit(self._options.commit(version.identity))
        return True

    # State.

    async def bring(self, state: PoolState, seconds: float) -> None:
        """Bring all replicas that answer to a state.

        Raises:
            SteeringFailed: A replica refused, or others hold it, or time was over.
        """
        names = list(await self._states())
        self._wanted = state
        try:
            async with asyncio.timeout(seconds):
                answers = await self._on_all(names, lambda c: self._bring(c, state))
        except TimeoutError:
            why = f"not all replicas were {state} within {seconds:g} s"
            raise SteeringFailed(why) from None
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                raise SteeringFailed(answer.detail, replica=name) from answer
            if isinstance(answer, ControlUnreachable):
                logger.warning("%s does not answer and was left as it is: %s", name, answer)

    async def _bring(self, control: WorkerControl, state: PoolState) -> None:
        options = self._options
        match state:
            case "Asleep":
                await control.sleep(options.sleep())
            case "Paused":
                await self._wake(control)
                await control.pause(PauseRequest(deadline_seconds=options.drain_seconds))
            case "Active":
                await self._wake(control)
                await control.resume()

    async def _wake(self, control: WorkerControl) -> None:
        """Weights, then the newest version of them, then the KV cache: the order that fits."""
        if (await control.state()).resident.weights:
            return await _quietly(control.wake())
        tags: tuple[tuple[MemoryTag, ...], ...] = (("weights",), ("kv_cache",))
        await _quietly(control.wake(WakeRequest(tags=tags[0])))
        if self.target is not None:
            await self._seed(self.target, control)
        await _quietly(control.wake(WakeRequest(tags=tags[1])))
        return None

    # All of them.

    def _controls(self) -> dict[str, WorkerControl]:
        """Control ports by the member's name."""
        found = {}
        for member in self._members():
            if member.control_url is None:
                why = "its control port is not known: give control_urls to from_urls"
                raise SteeringFailed(why, replica=member.name)
            found[member.name] = WorkerControl(member.control_url, self._token, self._http)
        return found

    async def _token(self) -> str | None:
        token = self._options.token
        return token() if callable(token) else token

    async def _states(self) -> dict[str, WorkerState]:
        """States of those that answer.

        Raises:
            SteeringFailed: Nobody does, or one refuses to tell.
        """
        answers = await self._on_all(list(self._controls()), lambda c: c.state())
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                raise SteeringFailed(answer.detail, replica=name) from answer
        found = {n: a for n, a in answers.items() if isinstance(a, WorkerState)}
        if not found:
            said = "; ".join(str(answer) for answer in answers.values())
            raise SteeringFailed(f"no worker answers ({said or 'the pool has no members'})")
        return found

    async def _on_all(
        self, names: Sequence[str], ask: Callable[[WorkerControl], Awaitable[T]]
    ) -> dict[str, T | ControlError | ControlUnreachable]:
        """Ask all of these at once; refusals and silence are answers."""
        controls = self._controls()

        async def one(name: str) -> T | ControlError | ControlUnreachable:
            if name not in controls:
                return ControlUnreachable(f"{name} is no member any more")
            try:
                return await ask(controls[name])
            except (ControlError, ControlUnreachable) as error:
                return error

        return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))


def _highest_epoch(state: WorkerState) -> int:
    weights = state.weights
    seen = (weights.active, weights.staged, weights.required)
    return max(weights.fence_epoch, *(each.epoch for each in seen if each is not None), 0)


def _refused(name: str, version: Version, error: ControlError) -> PublishFailed | EpochLost:
    if error.slug == "stale-epoch":
        return EpochLost(error.detail, replica=name)
    return PublishFailed(f"weights {version.identity}: {error.detail}", replica=name)


async def _quietly(wake: Awaitable[object]) -> None:
    """Wake; that others hold it still is for the caller's last call to say."""
    try:
        await wake
    except ControlError as error:
        if error.slug != "held":
            raise
