"""Weights and state of a pool without an operator: the client calls each control port.

The result is what the operator would do. All live replicas stage; when all have, all commit. A replica
that sleeps keeps pushed bytes for its wake. One that died in between, sleeps or fails to commit is fenced
and gets the weights before it serves again, and one that was restarted returns to the pool's state
(`pool_keeper`). Until the first commit, a failure leaves the old weights serving everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from rollout_client.discovery.pool_members import Member
from rollout_client.errors import EpochLost, PublishFailed, SteeringFailed
from rollout_client.settings import QUICK_CALL_SECONDS
from rollout_client.worker_control import ControlError, ControlUnreachable
from rollout_common.wire import (
    CommitResponse,
    RequireRequest,
    WeightsDtypes,
    WeightsId,
    WeightsSource,
    WorkerState,
)

from .control_ports import ControlPorts, DirectOptions
from .pool_keeper import PoolKeeper
from .pushing.push import Push
from .settings import PROGRESS_INTERVAL_SECONDS, RETRY_INTERVAL_SECONDS, STATE_ASK_SECONDS
from .staging_barrier import Barrier, Version, highest_epoch, refused, takes_pushes
from .steering_protocol import OnProgress, PoolState, Published, PublishProgress, Steering

logger = logging.getLogger(__name__)


class DirectSteering(Steering):
    """Steers a pool at the control ports of its members; calls `on_weights` when one (by URL) serves an identity."""

    def __init__(
        self,
        members: Callable[[], Sequence[Member]],
        options: DirectOptions,
        on_weights: Callable[[str, WeightsId], None] = lambda url, identity: None,
    ) -> None:
        self._members = members
        self._options = options
        self._on_weights = on_weights
        self._ports = ControlPorts(members, options.token, options.control_ca)
        self._keeper = PoolKeeper(self._ports, options, self._note_serving)

    @override
    async def close(self) -> None:
        await self._keeper.stop()
        await self._ports.close()

    @property
    @override
    def lowest_identity(self) -> WeightsId | None:
        # What was published last: a replica that came back with older weights gets no requests.
        target = self._keeper.target
        return None if target is None else target.identity

    @override
    async def wanted_state(self) -> PoolState | None:
        return self._keeper.state

    @override
    async def acquire_epoch(self, seconds: float) -> int:
        """Take the epoch above all that the workers have seen, and fence the lower ones.

        Without an API server there is nothing to compare and swap on: two trainers that do this at
        the same moment may both win, so a pool without an operator must have only one trainer.
        """
        try:
            async with asyncio.timeout(seconds):
                states = await self._ports.get_states()
                epoch = 1 + max(highest_epoch(state) for state in states.values())
                request = RequireRequest(epoch=epoch)
                answers = await self._ports.ask_members(lambda c: c.require(request), states)
        except TimeoutError:
            raise SteeringFailed(f"the workers did not confirm an epoch in {seconds:g} s") from None
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                kind = EpochLost if answer.slug == "stale-epoch" else SteeringFailed
                raise kind(answer.detail, replica=name) from answer
        return epoch

    @override
    async def publish_identity(
        self,
        identity: WeightsId,
        source: WeightsSource,
        seconds: float,
        tell: OnProgress,
        push: Push | None = None,
        root_hash: str | None = None,
    ) -> Published:
        """Stage on all live replicas, then commit on all.

        Raises:
            PublishFailed: Either nothing changed, or no replica answered the commit in time; each then gets
                the weights once it answers.
        """
        began = time.monotonic()
        until = began + seconds
        await self._keeper.stop()
        try:
            async with self._keeper.lock:
                states = await self._ports.get_states()
                if push is None and source.pushed is not None:
                    states = await self._await_handed_over(states, identity, until)
                awake = [name for name, state in states.items() if state.resident.weights]
                able = [] if push is None else [n for n, s in states.items() if takes_pushes(s)]
                asleep = [name for name in able if not states[name].resident.weights]
                version = Version(identity, source, root_hash)
                barrier = Barrier(self._ports, version, [*awake, *asleep], push=push, spared=asleep)
                await barrier.stage(until, tell)
                done = await self._commit_staged(barrier, states, began, until, tell)
                return done if push is None else push.reported(done, barrier.left)
        finally:
            # After a failure, too: a replica that comes back needs the earlier weights.
            self._keeper.start()

    @override
    async def describe_checkpoint(self) -> WeightsDtypes:
        return await self._ports.describe_checkpoint()

    async def _await_handed_over(
        self, states: dict[str, WorkerState], identity: WeightsId, until: float
    ) -> dict[str, WorkerState]:
        """Return the states once all workers were handed these weights: without an operator none fetches them from others.

        Raises:
            PublishFailed: One was not in time.
        """
        while (name := _lacks_handed_over(states, identity)) is not None:
            if time.monotonic() > until:
                raise PublishFailed(
                    f"weights {identity} were not handed over to it: hand them over to all replicas",
                    replica=name,
                )
            await asyncio.sleep(RETRY_INTERVAL_SECONDS)
            states = await self._ports.get_states()
        return states

    async def _commit_staged(
        self,
        barrier: Barrier,
        there: Collection[str],
        began: float,
        until: float,
        tell: OnProgress,
    ) -> Published:
        """Commit on all of those that were there that staged and are awake: from here it only goes forward."""
        identity, count = barrier.version.identity, len(barrier.committing)
        # Those that did not answer at the beginning, too: they get the weights before they serve.
        total = len({*there, *(member.name for member in self._members())})
        message = f"committing weights {identity} on {count} replicas"
        tell(PublishProgress("Committing", 0, count, message))
        root_hash = next(iter(barrier.staged.values()), barrier.version.root_hash)
        version = replace(barrier.version, root_hash=root_hash)
        # The keeper fences the others once they answer: nobody waits for a dead machine.
        answering = [name for name in there if name not in barrier.left]
        done = await self._order_commit(
            barrier, version, answering, max(0.0, until - time.monotonic())
        )
        self._note_serving(done, version)
        message = f"{len(done)} of {total} replicas serve weights {identity}"
        if late := total - len(done):
            message += f"; {late} get them before they serve again"
        tell(PublishProgress("Complete", len(done), total, message))
        return Published(
            identity=identity,
            root_hash=root_hash,
            replicas=len(done),
            seconds=time.monotonic() - began,
            pause_seconds=max((a.pause_seconds for a in done.values()), default=None),
            message=message,
        )

    async def _order_commit(
        self, barrier: Barrier, version: Version, answering: Iterable[str], left: float
    ) -> Mapping[str, CommitResponse]:
        """Order the commit and fence what missed it; return the answers of those that serve the version."""
        order = self._options.commit_request(version.identity, left, version.root_hash)
        try:
            answers = await self._ports.ask_members(
                lambda c: c.commit(order, timeout=left + QUICK_CALL_SECONDS), barrier.committing
            )
        except BaseException:
            # Cancelled: some replicas may have flipped, so the others must, too.
            self._keeper.target = barrier.version
            raise
        # An engine that died in its commit may have flipped: it starts again with what is active.
        errors = {
            n: a for n, a in answers.items() if isinstance(a, ControlError) and a.slug != "failed"
        }
        if errors and len(errors) == len(answers):
            await barrier.discard()
            name, error = next(iter(errors.items()))
            raise refused(name, version.identity, error)
        self._keeper.target = version
        # None of these may serve older weights, be it one that missed the commit or one that sleeps.
        floor = RequireRequest(epoch=version.identity.epoch, min_version=version.identity.version)
        await self._ports.ask_members(lambda control: control.require(floor), answering)
        done = {n: a for n, a in answers.items() if isinstance(a, CommitResponse)}
        if answers and not done:
            why = f"no replica answered to the commit of {version.identity} in time"
            raise PublishFailed(
                f"{why}; each gets it once it answers, as long as this pool is open"
            )
        return done

    def _note_serving(self, names: Iterable[str], version: Version) -> None:
        known = set(names)
        for member in self._members():
            if member.name in known:
                self._on_weights(member.url, version.identity)

    @override
    async def change_state(self, state: PoolState, seconds: float) -> int:
        """Move all replicas that answer to a state; return how many serve then.

        Waits for what passes: no replica answers, one loads, or another trainer has put one to sleep.
        """
        why = ""
        with self._keeper.ordering_state(state):
            try:
                async with asyncio.timeout(seconds):
                    while True:
                        try:
                            return await self._order_state(state)
                        except _Transient as error:
                            why = f": {error}"
                            turn = error.turn
                        await asyncio.sleep(RETRY_INTERVAL_SECONDS)
                        if (wish := self._keeper.state) != state:
                            raise SteeringFailed(f"this pool was asked to be {wish} meanwhile{why}")
                        if turn:
                            await self._wait_for_other_turns()
            except TimeoutError:
                text = f"not all replicas were {state} within {seconds:g} s{why}"
                raise SteeringFailed(text) from None

    async def _order_state(self, state: PoolState) -> int:
        """Move all replicas that answer now.

        Raises:
            SteeringFailed: A replica refused.
            _Transient: No replica answers, or one can't obey yet.
        """
        before = await self._ports.ask_members(lambda control: control.state())
        there = [name for name, answer in before.items() if isinstance(answer, WorkerState)]
        moved = await self._ports.ask_members(lambda c: self._keeper.change_state(c, state), there)
        answers = {**before, **moved}
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                turn = state == "Active" and _is_other_trainers_turn(answer, before[name])
                if turn or answer.slug in TRANSIENT_SLUGS:
                    raise _Transient(f"{name}: {answer.detail}", turn=turn)
                raise SteeringFailed(answer.detail, replica=name) from answer
        away = {n: a for n, a in answers.items() if isinstance(a, ControlUnreachable)}
        if len(away) == len(answers):
            said = "; ".join(dict.fromkeys(map(str, away.values()))) or "the pool has no members"
            raise _Transient(f"no worker answers ({said})")
        for name, answer in away.items():
            logger.warning("%s does not answer and was left as it is: %s", name, answer)
        return len(answers) - len(away) if state == "Active" else 0

    async def _wait_for_other_turns(self) -> None:
        """Wait until no trainer's turn keeps a replica asleep: a wake would end that sleep too early."""
        while True:
            answers = await self._ports.ask_members(lambda control: control.state())
            states = [each for each in answers.values() if isinstance(each, WorkerState)]
            if not any(hold.state == "Asleep" for each in states for hold in each.holds):
                return
            await asyncio.sleep(RETRY_INTERVAL_SECONDS)

    @override
    async def ask_state(self, state: PoolState, seconds: float) -> None:
        """Ask for a state and wait a moment; the keeper moves replicas that do not have it by then.

        Raises:
            SteeringFailed: A replica refused, or none answers that could note a wake.
        """
        try:
            await self.change_state(state, min(seconds, STATE_ASK_SECONDS))
        except SteeringFailed as error:
            if isinstance(error.__cause__, ControlError):
                raise
            if state != "Active":
                return  # the keeper moves them
            # A wake may wait for devices that this process holds, so this process must go on.
            answers = await self._ports.ask_members(
                lambda c: c.wake(timeout=PROGRESS_INTERVAL_SECONDS)
            )
            if all(isinstance(a, ControlUnreachable) and not a.slow for a in answers.values()):
                raise


class _Transient(Exception):
    """Impossible now, but perhaps not for long; `turn`: not before another trainer's turn is over."""

    def __init__(self, why: str, *, turn: bool = False) -> None:
        super().__init__(why)
        self.turn = turn


TRANSIENT_SLUGS = {
    "starting",
    "loading",
    "failed",
    "waking",
    "draining",
    "shutting-down",
    "changed-meanwhile",
}
"""Refusals of a worker that can't obey yet; the last one: another trainer of this name woke it during the call."""


def _is_other_trainers_turn(
    error: ControlError, before: WorkerState | ControlError | ControlUnreachable
) -> bool:
    """Whether it can't wake because another trainer, of this name or another one, wants it asleep."""
    if error.slug != "held" or not isinstance(before, WorkerState):
        return error.slug == "asleep"
    return any(hold.state == "Asleep" for hold in before.holds if hold.holder != before.caller)


def _lacks_handed_over(states: Mapping[str, WorkerState], identity: WeightsId) -> str | None:
    """Return a worker that has not got these weights."""
    for name, state in states.items():
        weights = state.weights
        if identity not in {each.identity for each in (weights.staged, weights.active) if each}:
            return name
    return None
