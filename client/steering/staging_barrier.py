"""The barrier of a publish by the client: every replica stages a version before any commits it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from rollout_client.errors import EpochLost, PublishFailed
from rollout_client.worker_control import ControlError, ControlUnreachable
from rollout_common.wire import (
    DiscardRequest,
    Lifecycle,
    StagedWeights,
    StageRequest,
    StageSource,
    WeightsId,
    WeightsSource,
    WorkerState,
)

from .control_ports import ControlPorts
from .pushing.push import Push
from .pushing.push_progress import ReplicaProgress
from .pushing.routes import Receiver
from .settings import DEAD_SECONDS, MAX_POLLS_PER_SECOND, MEMBERS_POLL_SECONDS, POLL_SECONDS
from .steering_protocol import MISMATCH, OnProgress, PublishProgress, content_mismatch_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Version:
    """Weights to stage; `root_hash` None: not known before replicas have read them."""

    identity: WeightsId
    source: WeightsSource
    root_hash: str | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """The replica has the version, staged or already active; with the root hash of the bytes that it read."""

    root_hash: str | None


@dataclass(frozen=True, slots=True)
class Unusable:
    """The replica can't use the version."""

    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The replica does not know the version: it was restarted in between."""


def progress_of(state: WorkerState, identity: WeightsId) -> Staged | Unusable | Lost | None:
    """Return a worker's progress with a version; None: it is still staging."""
    slot, active = state.weights.staged, state.weights.active
    if active is not None and active.identity == identity:
        return Staged(active.root_hash)
    if slot is None or WeightsId(epoch=slot.epoch, version=slot.version) != identity:
        return Lost()
    if slot.phase == "Failed":
        return Unusable(slot.error or "it names no reason")
    return Staged(slot.root_hash) if slot.phase == "Staged" else None


def takes_pushes(state: WorkerState) -> bool:
    """Whether a worker takes pushed bytes: its weights are in memory, or it sleeps and keeps the bytes for its wake."""
    return state.resident.weights or state.lifecycle is Lifecycle.ASLEEP


def highest_epoch(state: WorkerState) -> int:
    """Return the highest epoch that a worker has seen."""
    weights = state.weights
    seen = (weights.active, weights.staged, weights.required)
    return max(weights.fence_epoch, *(each.epoch for each in seen if each is not None), 0)


class Barrier:
    """Replicas that stage a version; some may leave before the end.

    Args:
        ports: Control ports of all members.
        version: What to stage.
        names: Members that take part.
        push: Brings the bytes; None: the replicas read them.
        spared: Members whose failure does not end the publish, since they don't serve: they leave.
    """

    def __init__(
        self,
        ports: ControlPorts,
        version: Version,
        names: Iterable[str],
        *,
        push: Push | None = None,
        spared: Collection[str] = (),
    ) -> None:
        self.version = version
        self.staged: dict[str, str | None] = {}
        """Root hash of what each replica read, by name; only those that have staged."""
        self._ports, self._push, self._spared = ports, push, frozenset(spared)
        self._news = asyncio.Event()
        self._looked_at = 0.0
        self.left: dict[str, str] = {}
        """Why replicas left, by name."""
        self._heard_at = dict.fromkeys(names, time.monotonic())
        """When each replica answered last, by name; only those that are still staging."""
        self._all = list(self._heard_at)
        self._pushed_to: frozenset[str] = frozenset()
        self._foreign: frozenset[str] = frozenset()
        """Replicas with other content under this identity, which is not ours to discard."""
        self._based: frozenset[str] = frozenset()
        """Replicas that take a delta."""

    @property
    def committing(self) -> list[str]:
        """Members that have staged and serve: they commit, and the spared ones once they wake."""
        return [name for name in self.staged if name not in self._spared]

    async def stage(self, until: float, tell: OnProgress) -> None:
        """Return when all live replicas have staged; if they have not by that time, none keeps what it staged.

        Raises:
            PublishFailed: A replica can't use the weights, has other content under their identity, or it
                took too long.
            EpochLost: A newer trainer owns a worker.
        """
        seconds = max(0.001, until - time.monotonic())
        try:
            async with asyncio.timeout(seconds):
                await self._stage(seconds, tell)
        except TimeoutError:
            missing = ", ".join(sorted(self._heard_at)) or "none"
            await self.discard()
            why = f"weights {self.version.identity} were not staged within {seconds:.3g} s"
            if self._push is not None and not self._push.filled:
                raise PublishFailed(f"{why}: their tensors did not all come") from None
            raise PublishFailed(f"{why}; not ready: {missing}") from None
        except BaseException:
            await self.discard()
            raise

    async def _stage(self, seconds: float, tell: OnProgress) -> None:
        identity, push = self.version.identity, self._push
        if push is not None:
            await push.planned()
        request = StageRequest(
            epoch=identity.epoch,
            version=identity.version,
            source=StageSource.of(self.version.source) if push is None else push.source,
            root_hash=self.version.root_hash,
            deadline_seconds=seconds,
        )
        answers = await self._begin(request, None if push is None else push.based)
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                self._give_up(name, refused(name, identity, answer))
        if push is not None:
            self._carry(push, answers)
        while True:
            tell(self._progress())
            if not self._heard_at:
                break
            self._news.clear()
            # Many replicas are asked less often, unless their pushes tell.
            asked = 0 if push is not None else len(self._heard_at)
            pause = max(POLL_SECONDS, asked / MAX_POLLS_PER_SECOND)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):  # `wait_for` may swallow a cancellation
                    await self._news.wait()
            await self._look()
        if push is not None:
            # A replica that starts loads a folder; pushed bytes without one need a replica that has them.
            if not self.staged and push.spool is None:
                raise PublishFailed(
                    "no replica takes the weights, so their bytes would be nowhere: wait until one has loaded,"
                    " or give spool="
                )
            self._compare(await push.ended())
            await push.durable()
        if len(set(self.staged.values())) > 1:
            raise PublishFailed(f"the bytes at {self.version.source.path} differ between replicas")

    def _compare(self, sent: str) -> None:
        """Compare content: a replica with other bytes than were sent ends the publish, a spared one leaves."""
        found = {name: has for name, has in self.staged.items() if has != sent}
        self._foreign = frozenset(found)
        for name, has in sorted(found.items()):
            error = content_mismatch_error(self.version.identity, sent, has, replica=name)
            if name not in self._spared:
                raise error
            logger.warning("publishing goes on without %s", error)
            del self.staged[name]
        self.version = replace(self.version, root_hash=sent)

    async def _begin(
        self, request: StageRequest, based: StageSource | None
    ) -> dict[str, StagedWeights | ControlError | ControlUnreachable]:
        """Ask all to stage, first with a base if there is one; a replica that serves another gets all bytes."""
        if based is None:
            return await self._ports.ask_members(lambda control: control.stage(request), self._all)
        first = request.model_copy(update={"source": based})
        answers = await self._ports.ask_members(lambda control: control.stage(first), self._all)
        # It serves other weights, or does not know bases.
        refusals = ("wrong-base", "invalid-request")
        errors = {name: a for name, a in answers.items() if isinstance(a, ControlError)}
        whole = [name for name, error in errors.items() if error.slug in refusals]
        self._based = frozenset(answers) - frozenset(whole)
        again = await self._ports.ask_members(lambda control: control.stage(request), whole)
        return {**answers, **again}

    def _carry(
        self,
        push: Push,
        answers: Mapping[str, StagedWeights | ControlError | ControlUnreachable],
    ) -> None:
        """Bring the bytes to every replica that gave a ticket."""
        receivers, hosts = [], self._ports.member_hosts()
        for name in sorted(self._heard_at):
            answer = answers[name]
            if isinstance(answer, ControlUnreachable):
                self._leave(name, str(answer))
            elif name not in hosts:
                self._leave(name, "it is not a member any more")
            elif isinstance(answer, StagedWeights) and answer.transfer is not None:
                receivers.append(Receiver(name, hosts[name], answer.transfer, name in self._based))
        loop = asyncio.get_running_loop()

        def news() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
                loop.call_soon_threadsafe(self._news.set)

        push.start(receivers, news, self._ports.trust)
        self._pushed_to = frozenset(each.name for each in receivers)

    def _progress(self) -> PublishProgress:
        done, total = len(self.staged), len(self._all)
        message = f"staging weights {self.version.identity}: {done} of {total} replicas have"
        if self._push is None or not self._pushed_to:
            return PublishProgress("Staging", done, total, message)
        has, all_of_it = self._push.progress.bytes_done, self._push.nbytes * len(self._pushed_to)
        message += f", {has} of {all_of_it} bytes are there"
        return PublishProgress("Staging", done, total, message, has, all_of_it)

    async def _look(self) -> None:
        """Update the progress of those that are still staging; ask those whose connection is silent."""
        now = time.monotonic()
        names = [name for name in list(self._heard_at) if not self._has_reported(name)]
        if self._push is not None:
            names = self._unheard(self._push, names, now)
        answers = await self._ports.ask_members(lambda control: control.state(), names)
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                self._give_up(name, refused(name, self.version.identity, answer))
            elif isinstance(answer, ControlUnreachable):
                if time.monotonic() - self._heard_at[name] > DEAD_SECONDS:
                    self._leave(name, str(answer))
            else:
                self._heard_at[name] = now
                self._judge(name, answer)

    def _unheard(self, push: Push, names: Iterable[str], now: float) -> list[str]:
        """Return the replicas to ask: their connection is broken, or silent for a while."""
        broken, silent = [], []
        for name in names:
            if self._pushed(name).why:
                broken.append(name)
            elif name in self._pushed_to and push.stands(name):
                self._heard_at[name] = now
            else:
                silent.append(name)
        if not silent or now - self._looked_at < MEMBERS_POLL_SECONDS:
            return broken
        self._looked_at = now
        return broken + silent

    def _has_reported(self, name: str) -> bool:
        """Whether the replica reported over the connection of its bytes that it has staged them."""
        root_hash = self._pushed(name).root_hash
        if root_hash is not None:
            self.staged[name] = root_hash
            del self._heard_at[name]
        return root_hash is not None

    def _pushed(self, name: str) -> ReplicaProgress:
        """Return the progress of the bytes that are sent to a replica; none, if it reads them itself."""
        if self._push is None or name not in self._pushed_to:
            return ReplicaProgress()
        return self._push.progress.of(name)

    def _judge(self, name: str, state: WorkerState) -> None:
        identity = self.version.identity
        match progress_of(state, identity):
            case Staged(root_hash):
                self.staged[name] = root_hash
                del self._heard_at[name]
            case Unusable(why):
                why = f"weights {identity} can't be used: {why}"
                self._give_up(name, PublishFailed(why, replica=name))
            case Lost() if (newer := highest_epoch(state)) > identity.epoch:
                # Its only slot is a newer trainer's: it was not restarted.
                why = (
                    f"a trainer with epoch {newer} has this worker, this one holds {identity.epoch}"
                )
                self._give_up(name, EpochLost(why, replica=name))
            case Lost():
                self._leave(name, "it was restarted")
            case None if broken := self._pushed(name).why:
                why = f"weights {identity} can't be brought there: {broken}"
                self._give_up(name, PublishFailed(why, replica=name))

    def _give_up(self, name: str, error: PublishFailed | EpochLost) -> None:
        """End the publish for one replica that can't go on, unless it is spared: then it leaves."""
        if name not in self._spared or isinstance(error, EpochLost):
            raise error
        self._leave(name, error.cause)

    def _leave(self, name: str, why: str) -> None:
        logger.warning("publishing goes on without %s: %s", name, why)
        self.left[name] = why
        del self._heard_at[name]

    async def discard(self) -> None:
        """Let all replicas drop what they have staged of this version."""
        if self._push is not None:
            self._push.stop()
        request = DiscardRequest(**self.version.identity.model_dump())
        ours = [name for name in self._all if name not in self._foreign]
        await self._ports.ask_members(lambda control: control.discard(request), ours)


def refused(name: str, identity: WeightsId, error: ControlError) -> PublishFailed | EpochLost:
    """Return the trainer's error for a worker's refusal of new weights."""
    if error.slug == "stale-epoch":
        return EpochLost(error.detail, replica=name)
    if error.slug == MISMATCH:
        return PublishFailed(f"{MISMATCH}: {error.detail}", replica=name)
    return PublishFailed(f"weights {identity}: {error.detail}", replica=name)
