"""What vLLM gives back and takes again on a GPU, by tags; a device that only counts stands in for one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from rollout_worker.engine import EngineError, TensorEntry, TensorSpec, WeightsLayout
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.shared_memory.sinks import MappedSink
from rollout_worker.engines.vllm.launch import StepCounter
from rollout_worker.engines.vllm.ranks import rank_memory
from rollout_worker.engines.vllm.steering import SchedulerControl
from rollout_worker.engines.vllm.vllm_streams import WeightLabels
from rollout_worker.engines.vllm.vllm_versions import VllmVersions
from rollout_worker.schemas import MemoryTag, WeightsId

ENTRIES = [TensorEntry("a", TensorSpec("U8", (3,)))]
BOTH: tuple[MemoryTag, ...] = ("weights", "kv_cache")
V1 = WeightsId(epoch=1, version=1)


class Device:
    """vLLM's core and its only worker: which memory is there, how often weights were loaded, and copied."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.there = set(BOTH)
        self.copied = False
        self.loads = self.brought_back = 0
        self.engine_core = self

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "rollout_pinned_bytes":
            return [self.nbytes if args[0] == 1 else 0]
        if method == "rollout_forget":
            assert "weights" not in self.there, "there is nothing to forget"
            self.copied = False
        elif method == "rollout_release":
            self.copied = self.copied or (args[0] == 1 and "weights" in args[1])
            self.there -= set(BOTH) if "weights" in args[1] else set(args[1])
        elif method == "rollout_wake":
            assert not self.there & set(args[0]), "taken twice"
            self.there |= set(args[0])
            if "weights" in args[0] and self.copied:
                self.copied, self.brought_back = False, self.brought_back + 1
        else:
            assert method == "rollout_load"
            assert "weights" in self.there, "loaded to where nothing is"
            self.loads += 1
        return [None]

    async def pause_scheduler_async(self, **_: object) -> None: ...

    async def resume_scheduler_async(self) -> None:
        assert self.there == set(BOTH), "steps without its memory"

    async def reset_prefix_cache_async(self, *_: object) -> None: ...

    async def set_weight_version_async(self, label: str) -> None: ...


class Sleeper:
    """The adapter's part that sleeps, on such a device."""

    def __init__(self, nbytes: int = 3) -> None:
        self.device = Device(nbytes)
        config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
        layout = WeightsLayout({"a": TensorSpec("U8", (3,))}, {}, {})
        launched: Any = SimpleNamespace(
            model=SimpleNamespace(pictures=None),
            llm=self.device,
            config=config,
            layout=layout,
            steps=StepCounter(),
            cpu=False,
        )
        labels = WeightLabels()
        steering = self.steering = SchedulerControl(launched, 2, labels)
        adapters: Any = SimpleNamespace(
            forget_memory=self._forget_adapters, switch_adapters=lambda loaded: None
        )
        options = EngineOptions(Path("model"))
        self.versions = VllmVersions(launched, steering, labels, options, adapters)

    async def _forget_adapters(self) -> None: ...

    @property
    def there(self) -> set[str]:
        """What is there, as the device has it and as the worker is told."""
        told = self.versions.resident_memory()
        assert {tag for tag in BOTH if getattr(told, tag)} == self.device.there
        return set(self.device.there)

    async def sleep(self, level: Literal[1, 2], *tags: MemoryTag) -> None:
        await self.versions.sleep(level, tags, self.refill)

    async def wake(self, *tags: MemoryTag) -> None:
        await self.versions.wake(tags, self.refill)

    async def wake_empty(self, *tags: MemoryTag) -> None:
        await self.versions.wake(tags, None)

    async def refill(self, *, on_disk: bool = False) -> MappedSink:
        assert not on_disk, "a GPU's weights are read back"
        sink = MappedSink(ENTRIES)
        sink.seal()
        return sink


@pytest.mark.parametrize("level", [1, 2])
async def test_weights_wake_and_are_committed_while_the_cache_sleeps(level: Literal[1, 2]) -> None:
    """The point of staged waking: a cache of tens of GB is not there while weights move."""
    sleeper = Sleeper()
    await sleeper.sleep(level, *BOTH)
    assert sleeper.there == set()
    await sleeper.wake("weights")
    assert sleeper.there == {"weights"}
    assert (sleeper.device.loads, sleeper.device.brought_back) == ((0, 1) if level == 1 else (1, 0))
    await sleeper.versions.commit(V1, await sleeper.refill(), "recompute")
    assert sleeper.there == {"weights"}
    await sleeper.wake("kv_cache")
    assert sleeper.there == set(BOTH)


async def test_a_cache_that_went_along_comes_back_with_the_weights() -> None:
    """On a GPU vLLM can't give weights back alone."""
    sleeper = Sleeper()
    await sleeper.sleep(1, "weights")
    assert sleeper.there == set()
    await sleeper.wake("weights")
    assert sleeper.there == set(BOTH)


@pytest.mark.parametrize(
    ("asleep", "awake"),
    [
        ([["kv_cache"], ["weights"]], ["weights", "kv_cache"]),
        ([["weights"], ["kv_cache"]], ["weights", "kv_cache"]),
        ([["weights", "kv_cache"]], ["kv_cache", "weights"]),
    ],
)
async def test_a_cache_that_was_put_to_sleep_itself_wakes_by_itself(
    asleep: list[list[MemoryTag]], awake: list[MemoryTag]
) -> None:
    sleeper = Sleeper()
    for tags in asleep:
        await sleeper.sleep(2, *tags)
    assert sleeper.there == set()
    await sleeper.wake(awake[0])
    assert sleeper.there == {awake[0]}
    await sleeper.wake(awake[1])
    assert (sleeper.there, sleeper.device.loads) == (set(BOTH), 1)


async def test_a_copy_in_main_memory_without_room_is_refused_before_it_is_made() -> None:
    """vLLM asks for it without a look: the kernel would end the worker."""
    sleeper = Sleeper(nbytes=1 << 60)
    with pytest.raises(EngineError, match=rf"no room for {1 << 60} bytes of weights"):
        await sleeper.sleep(1, *BOTH)
    assert sleeper.there == set(BOTH)
    await sleeper.sleep(2, *BOTH)
    assert sleeper.there == set()


@pytest.mark.parametrize("level", [1, 2])
async def test_what_level_1_kept_is_given_up_where_nobody_wants_it(level: Literal[1, 2]) -> None:
    """By level 2 on top, or by a wake whose values a commit brings: 141 GB of a 70B, not copied for nothing."""
    sleeper = Sleeper()
    await sleeper.sleep(1, *BOTH)
    assert sleeper.device.copied
    if level == 2:
        await sleeper.sleep(2, *BOTH)
    else:
        await sleeper.wake_empty("weights")
    assert not sleeper.device.copied
    if level == 2:
        await sleeper.wake(*BOTH)
        assert sleeper.device.loads == 1, "their values come from their source"
    assert sleeper.device.brought_back == 0


def piece(size: int, tag: str, *, asleep: bool = False) -> Any:
    """An entry of vLLM's allocator."""
    backup = object() if asleep else None
    return SimpleNamespace(
        handle=(0, size, 0, 0), tag=tag, is_asleep=asleep, cpu_backup_tensor=backup
    )


def test_room_is_counted_as_torch_takes_it() -> None:
    """Each locked piece is a power of two: 70B over 8 ranks takes 166 GB, not 141."""
    pieces = {
        1: piece(20 << 20, "weights"),
        2: piece(2 << 20, "weights"),
        3: piece(24 << 20, "kv_cache"),
        4: piece(5 << 20, "cudagraph"),
        5: piece(6 << 20, "weights", asleep=True),
    }
    assert rank_memory.count_pinned_bytes(pieces, 1) == (32 + 2 + 8) << 20
    assert rank_memory.count_pinned_bytes(pieces, 2) == 8 << 20


def test_only_pieces_with_buffers_stay_of_what_was_kept() -> None:
    buffer = torch.zeros(4)
    start = buffer.data_ptr()
    pieces = {
        start - 64: piece(64, "weights", asleep=True),
        start: piece(64, "weights", asleep=True),
        start + 64: piece(64, "weights", asleep=True),
        start + 128: piece(64, "cudagraph", asleep=True),
    }
    rank_memory.drop_weight_backups(pieces, [buffer, torch.zeros(0)])
    kept = [at - start for at, data in pieces.items() if data.cpu_backup_tensor is not None]
    assert kept == [0, 128]
