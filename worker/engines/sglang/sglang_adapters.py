"""LoRA adapters in SGLang's child, which knows each by a name."""

from __future__ import annotations

import contextlib
from pathlib import Path

from typing_extensions import override

from rollout_worker.engine import EngineCrashed, WeightsRejected
from rollout_worker.engines.file_adapters import FileAdapters

from .child_connection import CallFailed, ChildConnection


class SglangAdapters(FileAdapters[str]):
    """The adapters of one child."""

    def __init__(self, connection: ChildConnection, parent: Path | None) -> None:
        super().__init__("SGLang", parent)
        self._connection = connection

    @override
    def _make_handle(self, name: str, number: int, path: Path) -> str:
        return f"{name}@{number}"

    @override
    async def _load_adapter(self, name: str, handle: str, path: Path) -> None:
        try:
            await self._connection.call_child("load_adapter", name=handle, path=str(path))
        except CallFailed as error:
            raise WeightsRejected(f"SGLang can't serve adapter {name!r}: {error}") from error

    @override
    async def _remove_adapter(self, handle: str) -> None:
        # The child waits for requests that use it.
        with contextlib.suppress(CallFailed, EngineCrashed):
            await self._connection.call_child("unload_adapter", name=handle)
