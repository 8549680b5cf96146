"""LoRA adapters in vLLM, which knows each by a `LoRARequest`: a name, an id and a path."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from typing_extensions import override

from rollout_worker.engine import EngineCrashed, WeightsRejected
from rollout_worker.engines.file_adapters import FileAdapters


class VllmAdapters(FileAdapters[Any]):
    """The adapters of one running vLLM."""

    def __init__(self, llm: Any, parent: Path | None) -> None:
        super().__init__("vLLM", parent)
        self._llm = llm

    @override
    def _make_handle(self, name: str, number: int, path: Path) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(lora_name=f"{name}@{number}", lora_int_id=number, lora_path=str(path))

    @override
    async def _load_adapter(self, name: str, handle: Any, path: Path) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._llm.add_lora(handle)
        except EngineDeadError as error:
            raise EngineCrashed(f"vLLM died while it loaded adapter {name!r}") from error
        except Exception as error:
            raise WeightsRejected(f"vLLM can't serve adapter {name!r}: {error}") from error

    @override
    async def _remove_adapter(self, handle: Any) -> None:
        with contextlib.suppress(Exception):  # vLLM is dead
            await self._llm.remove_lora(handle.lora_int_id)
