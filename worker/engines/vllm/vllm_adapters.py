"""LoRA adapters in vLLM: each version's under names and ids that were never used, read from files that last as long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_worker.engine import EngineCrashed, EngineError, WeightsRejected
from rollout_worker.lora.lora_files import write_adapters
from rollout_worker.lora.lora_sink import LoraAdapter

from .settings import ADAPTER_LOAD_SECONDS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedAdapters:
    """The adapters of one version in vLLM: by name vLLM's `LoRARequest`, and the folder that it reads them from."""

    folder: Path
    requests: Mapping[str, Any]


class VllmAdapters:
    """The adapters of one running vLLM.

    vLLM keeps some adapters in memory and reads others again from their folder, whenever a request names them, also
    ones that were removed. So a name or id that came back could find another version's tensors, or its prefixes.
    """

    def __init__(self, llm: Any, parent: Path | None) -> None:
        self._llm = llm
        self._parent = parent
        self._loop = asyncio.get_running_loop()
        self._last_id = 0
        self._serving: LoadedAdapters | None = None
        self._removing: set[asyncio.Task[None]] = set()

    def find_request(self, name: str | None) -> Any:
        """Return vLLM's `LoRARequest` of an adapter that serves; None for none.

        Raises:
            KeyError: It serves no longer.
        """
        if name is None:
            return None
        if self._serving is None:
            raise KeyError(name)
        return self._serving.requests[name]

    def load_adapters(self, adapters: Sequence[LoraAdapter]) -> LoadedAdapters:
        """Write adapters to files and have vLLM read them; runs in a thread.

        Raises:
            WeightsRejected: vLLM can't serve one of them.
            EngineError: Their files do not fit, or vLLM did not answer.
        """
        from vllm.lora.request import LoRARequest

        requests: dict[str, Any] = {}
        folder, paths = write_adapters(adapters, self._parent)
        loaded = LoadedAdapters(folder, requests)
        try:
            for name, path in paths.items():
                self._last_id += 1
                request = LoRARequest(
                    lora_name=f"{name}@{self._last_id}",
                    lora_int_id=self._last_id,
                    lora_path=str(path),
                )
                requests[name] = request
                self._call_vllm(name, self._llm.add_lora(request))
        except BaseException:
            self.unload_adapters(loaded)
            raise
        return loaded

    def _call_vllm(self, name: str, call: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            answer.result(ADAPTER_LOAD_SECONDS)
        except TimeoutError as error:
            raise EngineError(
                f"vLLM did not load adapter {name!r} within {ADAPTER_LOAD_SECONDS:g} s"
            ) from error
        except EngineDeadError as error:
            raise EngineCrashed(f"vLLM died while it loaded adapter {name!r}") from error
        except Exception as error:
            raise WeightsRejected(f"vLLM can't serve adapter {name!r}: {error}") from error

    def unload_adapters(self, loaded: LoadedAdapters) -> None:
        """Have vLLM forget adapters and delete their files; from any thread, without waiting."""

        def start() -> None:
            task = self._loop.create_task(self._remove_adapters(loaded))
            self._removing.add(task)
            task.add_done_callback(self._removing.discard)

        with contextlib.suppress(RuntimeError):  # the loop has ended, and vLLM with it
            self._loop.call_soon_threadsafe(start)

    async def _remove_adapters(self, loaded: LoadedAdapters) -> None:
        for request in loaded.requests.values():
            with contextlib.suppress(Exception):  # vLLM is dead
                await self._llm.remove_lora(request.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, loaded.folder, ignore_errors=True)

    def switch_adapters(self, loaded: LoadedAdapters | None) -> None:
        """Let these adapters serve, and no others; call it while vLLM makes no steps."""
        former, self._serving = self._serving, loaded
        if former is not None:
            self.unload_adapters(former)

    async def forget_memory(self) -> None:
        """Have vLLM read what serves from its files again: its memory was given back."""
        for request in () if self._serving is None else self._serving.requests.values():
            await self._llm.remove_lora(request.lora_int_id)

    def delete_files(self) -> None:
        """Delete the files of what serves: vLLM has ended."""
        if self._serving is not None:
            shutil.rmtree(self._serving.folder, ignore_errors=True)
