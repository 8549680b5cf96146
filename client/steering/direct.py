"""Weights and state of a pool without an operator: the control ports are called one by one.

It comes to what the operator does. All live replicas stage; when all have, all commit; who died
meanwhile, sleeps or fails to commit is fenced and gets the weights before it serves again, and who
was restarted comes back to the pool's state. Before the first commit a failure leaves the old
weights serving everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from rollout_client.control import QUICK_SECONDS, ControlError, ControlUnreachable, WorkerControl
from rollout_client.discovery.members import Member
from rollout_client.errors import EpochLost, PublishFailed, SteeringFailed
from rollout_worker.schemas import (
    CommitRequest,
    CommitResponse,
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

from .barrier import POLL_SECONDS, Barrier, Version, refused
from .control_ports import ControlPorts, Token
from .protocol import OnProgress, PoolState, Published, PublishProgress

logger = logging.getLogger(__name__)

KEEP_SECONDS = 1.0
"""Between two looks at replicas that lack the pool's weights or state."""

SEED_SECONDS = 600.0
"""What staging on one of them may take."""


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

    def commit(self, identity: WeightsId, seconds: float | None = None) -> CommitRequest:
        """Return the order to flip to staged weights, drained in at most so many seconds."""
        drain = self.drain_seconds if seconds is None else min(self.drain_seconds, seconds)
        return CommitRequest(
            epoch=identity.epoch,
            version=identity.version,
            in_flight=self.in_flight,
            deadline_seconds=drain,
            on_deadline=self.on_deadline,
        )

    def sleep(self) -> SleepRequest:
        """Return the order to fall asleep."""
        return SleepRequest.model_validate(
            {"level": self.sleep_level, "deadline_seconds": self.drain_seconds}
        )


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
        self._ports = ControlPorts(members, options.token)
        self._wanted: PoolState | None = None
        self._lock = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Close all connections."""
        await self._stop_keeping()
        await self._ports.close()

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
                states = await self._ports.states()
                epoch = 1 + max(_highest_epoch(state) for state in states.values())
                request = RequireRequest(epoch=epoch)
                answers = await self._ports.ask(list(states), lambda c: c.require(request))
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
            PublishFailed: Nothing changed: a replica can't use the weights, or time was over. Or
                nobody answered to the commit in time: then they get the weights once they do.
            EpochLost: A newer trainer owns a worker.
        """
        began = time.monotonic()
        until = began + seconds
        await self._stop_keeping()
        try:
            async with self._lock:
                states = await self._ports.states()
                live = [name for name, state in states.items() if state.resident.weights]
                barrier = Barrier(self._ports, Version(identity, source), live)
                await barrier.stage(until, tell)
                return await self._commit(barrier, len(states), began, until, tell)
        finally:
            # Also after a failure: who comes back needs the weights of before.
            self._keep()

    async def _commit(
        self, barrier: Barrier, total: int, began: float, until: float, tell: OnProgress
    ) -> Published:
        """Commit on all that staged: from here it only goes forward."""
        version, count = barrier.version, len(barrier.staged)
        identity = version.identity
        message = f"committing weights {identity} on {count} replicas"
        tell(PublishProgress("Committing", 0, count, message))
        left = max(0.0, until - time.monotonic())
        order = self._options.commit(identity, left)
        try:
            answers = await self._ports.ask(
                list(barrier.staged), lambda c: c.commit(order, timeout=left + QUICK_SECONDS)
            )
        except BaseException:
            # Cancelled: some may have flipped, so the others must.
            self.target = version
            raise
        done = {n: a for n, a in answers.items() if isinstance(a, CommitResponse)}
        errors = {n: a for n, a in answers.items() if isinstance(a, ControlError)}
        if errors and len(errors) == len(answers):
            await barrier.discard()
            name, error = next(iter(errors.items()))
            raise refused(name, identity, error)
        self.target = version
        await self._fence(version)
        if answers and not done:
            why = f"no replica answered to the commit of {identity} in time"
            raise PublishFailed(f"{why}; each gets it as soon as it answers, while this pool lives")
        self._note(done, version)
        late = total - len(done)
        message = f"{len(done)} of {total} replicas serve weights {identity}"
        if late:
            message += f"; {late} get them before they serve again"
        tell(PublishProgress("Complete", len(done), total, message))
        return Published(
            identity=identity,
            root_hash=next(iter(barrier.staged.values()), None),
            replicas=len(done),
            seconds=time.monotonic() - began,
            pause_seconds=max((a.pause_seconds for a in done.values()), default=None),
            message=message,
        )

    async def _fence(self, version: Version) -> None:
        """Let nobody serve older weights: who missed the commit, who sleeps."""
        floor = RequireRequest(epoch=version.identity.epoch, min_version=version.identity.version)
        await self._ports.ask(self._ports.names(), lambda control: control.require(floor))

    def _note(self, names: Iterable[str], version: Version) -> None:
        known = set(names)
        for member in self._members():
            if member.name in known:
                self._on_weights(member.url, version.identity)

    # Those who lack the pool's weights or state.

    async def _stop_keeping(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    def _keep(self) -> None:
        needed = self.target is not None or self._wanted is not None
        if self._keeper is None and needed and not self._ports.closed:
            self._keeper = asyncio.create_task(self._keep_all(), name="keeper of the pool")

    async def _keep_all(self) -> None:
        """Bring weights and state to replicas that came, came back or woke without them."""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            async with self._lock:
                answers = await self._ports.ask(self._ports.names(), self._mend)
                seeded = [name for name, answer in answers.items() if answer is True]
                if self.target is not None:
                    self._note(seeded, self.target)
            for name, answer in answers.items():
                if isinstance(answer, ControlError):
                    logger.warning("%s lacks the pool's weights or state: %s", name, answer)

    async def _mend(self, control: WorkerControl) -> bool:
        """Give one replica what it lacks; whether it got weights."""
        seeded = self.target is not None and await self._seed(self.target, control)
        state = await control.state()
        held = {hold.state for hold in state.holds if hold.holder == state.caller}
        wanted = self._wanted
        while wanted in ("Asleep", "Paused") and wanted not in held:
            await self._bring(control, wanted)
            if wanted == self._wanted:
                break
            # Somebody changed it meanwhile, and this order may have come after theirs.
            wanted, held = self._wanted, set()
            if wanted == "Active":
                await self._bring(control, wanted)
        return seeded

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
        names = list(await self._ports.states())
        self._wanted = state
        self._keep()
        try:
            async with asyncio.timeout(seconds):
                answers = await self._ports.ask(names, lambda c: self._bring(c, state))
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


def _highest_epoch(state: WorkerState) -> int:
    weights = state.weights
    seen = (weights.active, weights.staged, weights.required)
    return max(weights.fence_epoch, *(each.epoch for each in seen if each is not None), 0)


async def _quietly(wake: Awaitable[object]) -> None:
    """Wake; that others hold it still is for the caller's last call to say."""
    try:
        await wake
    except ControlError as error:
        if error.slug != "held":
            raise
