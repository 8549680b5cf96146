"""Host memory in which a version of adapters is staged; engines load them from there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_common.wire.adapters import (
    CONFIG_KEY,
    AdapterConfig,
    AdapterRefused,
    ServedAdapter,
    split_entry,
    split_key,
)
from rollout_common.wire.root_hash import HashedTensor, TensorHasher, root_hash_of
from rollout_worker.engine import Sink, TensorEntry, TensorSpec, WeightsRejected

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
