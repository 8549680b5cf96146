"""LoRA adapters in SGLang's child: each version's under names that were never used, read from files that last as long."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_worker.engine import EngineCrashed, EngineError, WeightsRejected
from rollout_worker.lora.lora_files import write_adapters
from rollout_worker.lora.lora_sink import LoraAdapter

from .child_connection import CallFailed, ChildConnection
from .settings import ADAPTER_LOAD_SECONDS


@dataclass(frozen=True, slots=True)
class ChildAdapters:
    """The adapters of one version in the child: by name the child's own name, and the folder of their files."""

    folder: Path
    names: Mapping[str, str]


class SglangAdapters:
    """The adapters of one child. SGLang loads an adapter that was unloaded again when a request names it: so no name comes back."""

    def __init__(self, connection: ChildConnection, parent: Path | None) -> None:
        self._connection = connection
        self._parent = parent
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._serving: ChildAdapters | None = None
        self._unloading: set[asyncio.Task[None]] = set()

    def find_name(self, name: str | None) -> str | None:
        """Return the child's name of an adapter that serves; None for none.

        Raises:
            KeyError: It serves no longer.
        """
        if name is None:
            return None
        if self._serving is None:
            raise KeyError(name)
        return self._serving.names[name]

    def load_adapters(self, adapters: Sequence[LoraAdapter]) -> ChildAdapters:
        """Write adapters to files and have the child load them; runs in a thread.

        Raises:
            WeightsRejected: SGLang can't serve one of them.
            EngineError: Their files do not fit, or the child did not answer.
        """
        names: dict[str, str] = {}
        folder, paths = write_adapters(adapters, self._parent)
        loaded = ChildAdapters(folder, names)
        try:
            for name, path in paths.items():
                names[name] = f"{name}@{next(self._numbers)}"
                self._load_adapter(name, names[name], path)
        except BaseException:
            self.unload_adapters(loaded)
            raise
        return loaded

    def _load_adapter(self, name: str, unique: str, path: Path) -> None:
        call = self._connection.call_child("load_adapter", name=unique, path=str(path))
        answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            answer.result(ADAPTER_LOAD_SECONDS)
        except TimeoutError as error:
            raise EngineError(
                f"SGLang did not load adapter {name!r} within {ADAPTER_LOAD_SECONDS:g} s"
            ) from error
        except CallFailed as error:
            raise WeightsRejected(f"SGLang can't serve adapter {name!r}: {error}") from error

    def unload_adapters(self, loaded: ChildAdapters) -> None:
        """Have the child forget adapters, and delete their files; from any thread, without waiting."""

        def start() -> None:
            task = self._loop.create_task(self._unload_all(loaded))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

        with contextlib.suppress(RuntimeError):  # the loop has ended, and the child with it
            self._loop.call_soon_threadsafe(start)

    async def _unload_all(self, loaded: ChildAdapters) -> None:
        for name in loaded.names.values():
            # The child waits for requests that use it; one that has died has nothing loaded.
            with contextlib.suppress(CallFailed, EngineCrashed):
                await self._connection.call_child("unload_adapter", name=name)
        await asyncio.to_thread(shutil.rmtree, loaded.folder, ignore_errors=True)

    def switch_adapters(self, loaded: ChildAdapters | None) -> None:
        """Let these adapters serve, and no others; call it while the child makes no steps."""
        former, self._serving = self._serving, loaded
        if former is not None:
            self.unload_adapters(former)

    def delete_files(self) -> None:
        """Delete the files of what serves: the child has ended."""
        if self._serving is not None:
            shutil.rmtree(self._serving.folder, ignore_errors=True)
