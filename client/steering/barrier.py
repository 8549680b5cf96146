"""A version on its way to replicas without an operator: all stage it before any commits it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from rollout_client.control import ControlError, ControlUnreachable
from rollout_client.errors import EpochLost, PublishFailed
from rollout_worker.schemas import (
    DiscardRequest,
    StageRequest,
    WeightsId,
    WeightsSource,
    WorkerState,
)

from .control_ports import ControlPorts
from .protocol import OnProgress, PublishProgress

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
DEAD_SECONDS = 5.0
"""A replica that does not answer for so long while it stages leaves the barrier."""


@dataclass(frozen=True, slots=True)
class Version:
    """Weights as they are staged."""

    identity: WeightsId
    source: WeightsSource


@dataclass(frozen=True, slots=True)
class Staged:
    """The replica has the version, staged or already active.

    Attributes:
        root_hash: Of the bytes that it read.
    """

    root_hash: str | None


@dataclass(frozen=True, slots=True)
class Unusable:
    """The replica can't use the version."""

    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The replica knows nothing of the version: it was restarted meanwhile."""


def progress_of(state: WorkerState, identity: WeightsId) -> Staged | Unusable | Lost | None:
    """Say how far a worker is with a version; None: it is still staging."""
    slot, active = state.weights.staged, state.weights.active
    if active is not None and active.identity == identity:
        return Staged(active.root_hash)
    if slot is None or WeightsId(epoch=slot.epoch, version=slot.version) != identity:
        return Lost()
    if slot.phase == "Failed":
        return Unusable(slot.error or "it names no reason")
    return Staged(slot.root_hash) if slot.phase == "Staged" else None


class Barrier:
    """Replicas that stage a version, and who has left.

    Args:
        ports: Control ports of all members.
        version: What to stage.
        names: Members that take part.
        dead_seconds: Who does not answer for so long leaves.
    """

    def __init__(
        self,
        ports: ControlPorts,
        version: Version,
        names: Iterable[str],
        *,
        dead_seconds: float = DEAD_SECONDS,
    ) -> None:
        self.version = version
        self.staged: dict[str, str | None] = {}
        """By name of who has staged: the root hash of what it read."""
        self._ports = ports
        self._dead_seconds = dead_seconds
        self._heard_at = dict.fromkeys(names, time.monotonic())
        """By name of who is still staging: when it answered last."""
        self._all = list(self._heard_at)

    async def stage(self, until: float, tell: OnProgress) -> None:
        """Return when all live replicas have staged; if that fails, none keeps what it staged.

        Args:
            until: Deadline on the monotonic clock.
            tell: Called with how far it is.

        Raises:
            PublishFailed: A replica can't use the weights, or it took too long.
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
            raise PublishFailed(f"{why}; not ready: {missing}") from None
        except BaseException:
            await self.discard()
            raise

    async def _stage(self, seconds: float, tell: OnProgress) -> None:
        identity, total = self.version.identity, len(self._all)
        request = StageRequest(
            epoch=identity.epoch,
            version=identity.version,
            source=self.version.source,
            deadline_seconds=seconds,
        )
        answers = await self._ports.ask(self._all, lambda control: control.stage(request))
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                raise refused(name, identity, answer)
        while True:
            done = len(self.staged)
            message = f"staging weights {identity}: {done} of {total} replicas have"
            tell(PublishProgress("Staging", done, total, message))
            if not self._heard_at:
                break
            await asyncio.sleep(POLL_SECONDS)
            await self._look()
        if len(set(self.staged.values())) > 1:
            path = self.version.source.path
            raise PublishFailed(f"the bytes at {path} differ between replicas")

    async def _look(self) -> None:
        """Ask those that are still staging how far they are."""
        answers = await self._ports.ask(list(self._heard_at), lambda control: control.state())
        now = time.monotonic()
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                raise refused(name, self.version.identity, answer)
            if isinstance(answer, ControlUnreachable):
                if now - self._heard_at[name] > self._dead_seconds:
                    self._leave(name, str(answer))
                continue
            self._heard_at[name] = now
            self._judge(name, answer)

    def _judge(self, name: str, state: WorkerState) -> None:
        identity = self.version.identity
        match progress_of(state, identity):
            case Staged(root_hash):
                self.staged[name] = root_hash
                del self._heard_at[name]
            case Unusable(why):
                raise PublishFailed(f"weights {identity} can't be used: {why}", replica=name)
            case Lost():
                self._leave(name, "it was restarted")

    def _leave(self, name: str, why: str) -> None:
        logger.warning("publishing goes on without %s: %s", name, why)
        del self._heard_at[name]

    async def discard(self) -> None:
        """Let all drop what they have staged of this version."""
        request = DiscardRequest(**self.version.identity.model_dump())
        await self._ports.ask(self._all, lambda control: control.discard(request))


def refused(name: str, identity: WeightsId, error: ControlError) -> PublishFailed | EpochLost:
    """Return the trainer's error for a worker's refusal of new weights."""
    if error.slug == "stale-epoch":
        return EpochLost(error.detail, replica=name)
    return PublishFailed(f"weights {identity}: {error.detail}", replica=name)
