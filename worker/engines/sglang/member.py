"""The part of SGLang that runs on a node beside the head's.

Its ranks are commanded by the head's through SGLang's own channels; what is to do here is to start
and watch them, and to give memory where their loader looks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from typing_extensions import override

from rollout_worker.engine import EngineError, Entry, Member, MemberInfo, Sink
from rollout_worker.engines import EngineOptions
from rollout_worker.schemas import Progress

from . import settings
from .model import Model
from .node import Node
from .versions import open_slot


class SglangMember(Member):
    """This node's ranks."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._model: Model | None = None
        self._node = Node(options, settings.parse(options.args), lambda _: None, lambda: None)

    @override
    async def start(self, report: Callable[[Progress], None]) -> MemberInfo:
        loaded = await self._node.start(report)
        self._model = loaded.model
        return MemberInfo(str(self._options.model), loaded.root_hash, loaded.model.layout)

    @override
    def unread(self, entries: Sequence[Entry]) -> frozenset[str]:
        return frozenset()  # each rank has a slice of every tensor, for there are no pipelines

    @override
    async def open_slot(
        self,
        slot: str,
        entries: Sequence[Entry],
        *,
        on_disk: bool = False,
        unread: Collection[str] = (),
    ) -> Sink:
        if self._model is None:
            raise EngineError("the engine is not started")
        return await open_slot(self._options, self._model, entries, slot)

    @override
    def alive(self) -> str | None:
        return self._node.alive()

    @override
    async def stop(self) -> None:
        await self._node.stop()
