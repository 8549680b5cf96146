"""What an adapter hands on as it stands: the verbs of weights and memory, to its `Versions`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Literal, Protocol

from rollout_worker.engine import KvPolicy, StagedInfo, StageProgress
from rollout_worker.schemas import MemoryTag, WeightsId, WeightsSource


class Versions(Protocol):
    """The weights of one running engine; each method as that of `Engine`."""

    async def stage(
        self, identity: WeightsId, source: WeightsSource, progress: StageProgress
    ) -> StagedInfo:
        """See `Engine.stage`."""
        ...

    async def commit(self, identity: WeightsId, kv: KvPolicy) -> None:
        """See `Engine.commit`."""
        ...

    async def discard(self) -> None:
        """See `Engine.discard`."""
        ...

    async def sleep(self, level: Literal[1, 2], tags: Collection[MemoryTag]) -> None:
        """See `Engine.sleep`."""
        ...

    async def wake(self, tags: Collection[MemoryTag], source: WeightsSource) -> None:
        """See `Engine.wake`."""
        ...


class HandsOnWeights(ABC):
    """Base of an engine whose weights are a part of their own."""

    @abstractmethod
    def _versions_of(self) -> Versions:
        """Return that part; raises `EngineError` unless the engine is started and lives."""

    async def stage(
        self, identity: WeightsId, source: WeightsSource, progress: StageProgress
    ) -> StagedInfo:
        """See `Engine.stage`."""
        return await self._versions_of().stage(identity, source, progress)

    async def commit(self, identity: WeightsId, kv: KvPolicy) -> None:
        """See `Engine.commit`."""
        await self._versions_of().commit(identity, kv)

    async def discard(self) -> None:
        """See `Engine.discard`."""
        await self._versions_of().discard()

    async def sleep(self, level: Literal[1, 2], tags: Collection[MemoryTag]) -> None:
        """See `Engine.sleep`."""
        await self._versions_of().sleep(level, tags)

    async def wake(self, tags: Collection[MemoryTag], source: WeightsSource) -> None:
        """See `Engine.wake`."""
        await self._versions_of().wake(tags, source)
