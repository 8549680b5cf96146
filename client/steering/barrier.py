"""A version on its way to replicas without an operator: all stage it before anybody commits."""

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


class Barrier:
    """Replicas that stage a version, and who has left.

    Args:
        ports: Of all members.
        version: What to stage.
        names: Members that take part.
    """

    def __init__(self, ports: ControlPorts, version: Version, names: Iterable[str]) -> None:
        self.version = version
        self.staged: dict[str, str | None] = {}
        """By name: its root hash."""
        self._ports = ports
        self._waiting = dict.fromkeys(names, time.monotonic())
        """By name: when it answered last."""
        self._all = list(self._waiting)

    async def stage(self, until: float, tell: OnProgress) -> None:
        """Return when all that live have staged; else nobody keeps what it staged.

        Args:
            until: Deadline on the monotonic clock.
            tell: Told how far it is.

        Raises:
            PublishFailed: One can't use the weights, or it took too long.
            EpochLost: A newer trainer owns a worker.
        """
        began = time.monotonic()
        seconds = max(0.001, until - began)
        try:
            async with asyncio.timeout(seconds):
                await self._stage(seconds, tell)
        except TimeoutError:
            waits = ", ".join(sorted(self._waiting)) or "nobody"
            await self.discard()
            why = f"weights {self.version.identity} were not staged within {seconds:.3g} s"
            raise PublishFailed(f"{why}: {waits} had not") from None
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
            if not self._waiting:
                break
            await asyncio.sleep(POLL_SECONDS)
            await self._look()
        if len(set(self.staged.values())) > 1:
            path = self.version.source.path
            raise PublishFailed(f"the bytes at {path} differ between replicas")

    async def _look(self) -> None:
        """Ask those that stage how far they are."""
        answers = await self._ports.ask(list(self._waiting), lambda control: control.state())
        now = time.monotonic()
        for name, state in answers.items():
            if isinstance(state, ControlUnreachable):
                if now - self._waiting[name] > DEAD_SECONDS:
                    logger.warning("%s left the barrier: %s", name, state)
                    del self._waiting[name]
                continue
            if isinstance(state, ControlError):
                raise refused(name, self.version.identity, state)
            self._waiting[name] = now
            self._take(name, state)

    def _take(self, name: str, state: WorkerState) -> None:
        identity = self.version.identity
        slot, active = state.weights.staged, state.weights.active
        if active is not None and active.identity == identity:
            self.staged[name] = active.root_hash
            del self._waiting[name]
        elif slot is None or WeightsId(epoch=slot.epoch, version=slot.version) != identity:
            logger.warning("%s left the barrier: it was restarted", name)
            del self._waiting[name]
        elif slot.phase == "Failed":
            why = slot.error or "it names no reason"
            raise PublishFailed(f"weights {identity} can't be used: {why}", replica=name)
        elif slot.phase == "Staged":
            self.staged[name] = slot.root_hash
            del self._waiting[name]

    async def discard(self) -> None:
        """Let all drop what they have staged of this version."""
        request = DiscardRequest(**self.version.identity.model_dump())
        await self._ports.ask(self._all, lambda control: control.discard(request))


def refused(name: str, identity: WeightsId, error: ControlError) -> PublishFailed | EpochLost:
    """Return the trainer's word for what a worker answered to new weights."""
    if error.slug == "stale-epoch":
        return EpochLost(error.detail, replica=name)
    return PublishFailed(f"weights {identity}: {error.detail}", replica=name)
