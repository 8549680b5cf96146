"""LoRA adapters of an engine in processes of its own: each version's under names that were never used, read from files that last as long.

Such an engine reads an adapter again from its folder whenever a request names it, also one that was removed. So a name
that came back could find another version's tensors, or its prefixes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from rollout_worker.engine import EngineError, InvalidRequest
from rollout_worker.lora.lora_sink import LoraAdapter, write_adapters

from .settings import ADAPTER_LOAD_SECONDS

HandleT = TypeVar("HandleT")


@dataclass(frozen=True, slots=True)
class LoadedAdapters(Generic[HandleT]):
    """The adapters of one version: by name what the engine knows each by, and the folder of their files."""

    folder: Path
    handles: Mapping[str, HandleT]


class FileAdapters(ABC, Generic[HandleT]):
    """The adapters of one running engine, made in its loop.

    Args:
        engine: Its name in messages.
        parent: Where files go; None: the system's own place for temporary ones.
    """

    def __init__(self, engine: str, parent: Path | None) -> None:
        self._engine = engine
        self._parent = parent
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._serving: LoadedAdapters[HandleT] | None = None
        self._removing: set[asyncio.Task[None]] = set()

    @abstractmethod
    def _make_handle(self, name: str, number: int, path: Path) -> HandleT:
        """Return what the engine is to know an adapter by; no other one gets this number."""

    @abstractmethod
    async def _load_adapter(self, name: str, handle: HandleT, path: Path) -> None:
        """Have the engine read an adapter.

        Raises:
            WeightsRejected: It can't serve it.
            EngineCrashed: It has died.
        """

    @abstractmethod
    async def _remove_adapter(self, handle: HandleT) -> None:
        """Have the engine forget an adapter; an engine that has died has none."""

    def find_handle(self, name: str | None) -> HandleT | None:
        """Return what the engine knows an adapter by that serves; None for none.

        Raises:
            InvalidRequest: It serves no longer.
        """
        if name is None:
            return None
        found = {} if self._serving is None else self._serving.handles
        if name not in found:
            raise InvalidRequest(
                "adapter", f"adapter {name!r} serves no longer: the weights have changed"
            )
        return found[name]

    def load_adapters(self, adapters: Sequence[LoraAdapter]) -> LoadedAdapters[HandleT]:
        """Write adapters to files and have the engine read them; runs in a thread.

        Raises:
            WeightsRejected: The engine can't serve one of them.
            EngineError: Their files do not fit, or the engine did not answer.
        """
        handles: dict[str, HandleT] = {}
        folder, paths = write_adapters(adapters, self._parent)
        loaded = LoadedAdapters(folder, handles)
        try:
            for name, path in paths.items():
                handle = handles[name] = self._make_handle(name, next(self._numbers), path)
                self._call_loop(name, self._load_adapter(name, handle, path))
        except BaseException:
            self.unload_adapters(loaded)
            raise
        return loaded

    def _call_loop(self, name: str, call: Coroutine[Any, Any, None]) -> None:
        answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            answer.result(ADAPTER_LOAD_SECONDS)
        except TimeoutError as error:
            raise EngineError(
                f"{self._engine} did not load adapter {name!r} within {ADAPTER_LOAD_SECONDS:g} s"
            ) from error

    def unload_adapters(self, loaded: LoadedAdapters[HandleT]) -> None:
        """Have the engine forget adapters, and delete their files; from any thread, without waiting."""

        def start() -> None:
            task = self._loop.create_task(self._remove_adapters(loaded))
            self._removing.add(task)
            task.add_done_callback(self._removing.discard)

        with contextlib.suppress(RuntimeError):  # the loop has ended, and the engine with it
            self._loop.call_soon_threadsafe(start)

    async def _remove_adapters(self, loaded: LoadedAdapters[HandleT]) -> None:
        for handle in loaded.handles.values():
            await self._remove_adapter(handle)
        await asyncio.to_thread(shutil.rmtree, loaded.folder, ignore_errors=True)

    def switch_adapters(self, loaded: LoadedAdapters[HandleT] | None) -> None:
        """Let these adapters serve, and no others; call it while the engine makes no steps."""
        former, self._serving = self._serving, loaded
        if former is not None:
            self.unload_adapters(former)

    async def forget_memory(self) -> None:
        """Have the engine read what serves from its files again: its memory was given back."""
        for handle in () if self._serving is None else self._serving.handles.values():
            await self._remove_adapter(handle)

    def delete_files(self) -> None:
        """Delete the files of what serves: the engine has ended."""
        if self._serving is not None:
            shutil.rmtree(self._serving.folder, ignore_errors=True)
