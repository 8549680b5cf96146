"""Host memory in which a version of adapters is staged; engines load them from there, or from files."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rollout_common.wire.adapters import (
    CONFIG_KEY,
    TENSORS_FILE,
    AdapterConfig,
    AdapterRefused,
    ServedAdapter,
    split_entry,
    split_key,
    tensor_key,
)
from rollout_common.wire.root_hash import HashedTensor, TensorHasher, root_hash_of
from rollout_worker.engine import EngineError, Sink, TensorEntry, TensorSpec, WeightsRejected

from .lora_checks import check_config


@dataclass(frozen=True, slots=True)
class LoraTensor:
    """One half of a module's pair: what it is, and its bytes in row-major order."""

    spec: TensorSpec
    content: bytearray


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One adapter of a version, in host memory: `pairs` has lora_A [r, in] and lora_B [out, r] of each module."""

    name: str
    root_hash: str
    config: AdapterConfig
    pairs: Mapping[str, tuple[LoraTensor, LoraTensor]] = field(repr=False)

    def to_wire(self) -> ServedAdapter:
        """Return it as clients see it."""
        return ServedAdapter(name=self.name, root_hash=self.root_hash, rank=self.config.rank)


LoadAdapters = Callable[[Sequence[LoraAdapter]], Any]
"""Loads adapters into an engine, next to those that serve, in a thread; returns what `UnloadAdapters` takes."""

UnloadAdapters = Callable[[Any], None]
"""Gives loaded adapters up; idempotent, never blocks, and works on an engine that has ended."""


ClaimMemory = Callable[[int], Callable[[], None]]
"""Charges so many bytes as staged weights, or raises `EngineError`; returns what gives them back, which is idempotent."""


class LoraSink(Sink):
    """A sink for the tensors of adapters; `seal` has the engine load them, so that it refuses them while they are staged.

    To make it may block: `claim` waits for memory that is still being freed.
    """

    slot = ""
    memory: Literal["host", "device"] = "host"
    took = False

    def __init__(
        self,
        entries: Sequence[TensorEntry],
        base_root_hash: str,
        load: LoadAdapters,
        unload: UnloadAdapters,
        claim: ClaimMemory,
    ) -> None:
        self._entries = tuple(entries)
        self._base = base_root_hash
        self._load, self._unload = load, unload
        self._content: dict[str, bytearray] = {}
        self.loaded: Any = None
        """What the engine has loaded and does not serve; None: nothing."""
        self.adapters: tuple[LoraAdapter, ...] = ()
        """What it holds, once it is sealed."""
        self.sealed = False
        self._give_back = claim(self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.spec.nbytes for entry in self._entries)

    def allocate(self, entry: TensorEntry) -> memoryview:
        """Return a buffer for a tensor."""
        content = self._content[entry.name] = bytearray(entry.spec.nbytes)
        return memoryview(content)

    def seal(self) -> None:
        """Check what came, and load it into the engine.

        Raises:
            WeightsRejected: A configuration is wrong, or the engine can't serve an adapter.
        """
        groups: dict[str, list[TensorEntry]] = {}
        for entry in self._entries:
            groups.setdefault(split_entry(entry.name)[0], []).append(entry)
        self.adapters = tuple(self._read_adapter(name, groups[name]) for name in sorted(groups))
        self.loaded = self._load(self.adapters)
        self.sealed = True

    def close(self) -> None:
        """Give up what was loaded and does not serve."""
        loaded, self.loaded = self.loaded, None
        self._content.clear()
        if loaded is not None:
            self._unload(loaded)
        self._give_back()

    def _read_adapter(self, name: str, entries: Sequence[TensorEntry]) -> LoraAdapter:
        hashed: dict[str, HashedTensor] = {}
        halves: dict[str, dict[str, LoraTensor]] = {}
        config: AdapterConfig | None = None
        for entry in entries:
            content = self._content[entry.name]
            hasher = TensorHasher()
            hasher.update(memoryview(content))
            _, key = split_entry(entry.name)
            hashed[key] = HashedTensor(entry.spec.dtype, entry.spec.shape, hasher.hexdigest())
            try:
                if key == CONFIG_KEY:
                    config = AdapterConfig.decode(bytes(content))
                    continue
                module, half = split_key(key)
            except AdapterRefused as error:
                raise WeightsRejected(f"adapter {name!r}: {error}", tensor=entry.name) from error
            halves.setdefault(module, {})[half] = LoraTensor(entry.spec, content)
        assert config is not None, "the layout was checked"
        pairs = {module: (pair["lora_A"], pair["lora_B"]) for module, pair in halves.items()}
        ranks = {a.spec.shape[0] for a, _ in pairs.values()}
        check_config(name, config, ranks, self._base)
        return LoraAdapter(name, root_hash_of(hashed), config, pairs)


def write_adapters(
    adapters: Sequence[LoraAdapter], parent: Path | None
) -> tuple[Path, dict[str, Path]]:
    """Write adapters into a new folder below `parent` (None: the system's own for temporary files).

    Returns the folder, and by name each adapter's folder in it, which has what PEFT writes.

    Raises:
        EngineError: They do not fit there.
    """
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="rollout-adapters-", dir=parent))
        return folder, {
            each.name: _write_adapter(folder / str(n), each) for n, each in enumerate(adapters)
        }
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        where = parent or tempfile.gettempdir()
        raise EngineError(
            f"the adapters can't be written to {where}: {error}; free space there, or set another spill_dir"
        ) from error


def _write_adapter(folder: Path, adapter: LoraAdapter) -> Path:
    folder.mkdir()
    config = adapter.config
    fields = {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "use_rslora": config.rslora,
        "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in adapter.pairs}),
    }
    (folder / CONFIG_KEY).write_text(json.dumps(fields))
    halves = [
        (tensor_key(module, half), tensor)
        for module, pair in adapter.pairs.items()
        for half, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
    ]
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in halves:
        begin, end = end, end + tensor.spec.nbytes
        shape = list(tensor.spec.shape)
        header[name] = {"dtype": tensor.spec.dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / TENSORS_FILE).open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in halves:
            stream.write(tensor.content)
    return folder
