"""What vLLM gives back and takes again on a GPU, by tags; a device that only counts stands in for one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from rollout_worker.engine import EngineError, Entry, Layout, TensorSpec
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.mapped import MappedSink
from rollout_worker.engines.vllm.gate import Gate
from rollout_worker.engines.vllm.labels import Labels
from rollout_worker.engines.vllm.launch import Steps
from rollout_worker.engines.vllm.steering import Steering
from rollout_worker.engines.vllm.versions import Versions
from rollout_worker.schemas import MemoryTag, WeightsId

ENTRIES = [Entry("a", TensorSpec("U8", (3,)))]
BOTH: tuple[MemoryTag, ...] = ("weights", "kv_cache")
V1 = WeightsId(epoch=1, version=1)


class Device:
    """vLLM's core and its only worker: which memory is there, and how often weights were loaded."""

    def __init__(self) -> None:
        self.there = set(BOTH)
        self.loads = 0
        self.engine_core = self

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "rollout_release":
            self.there -= set(BOTH) if "weights" in args[1] else set(args[1])
        elif method == "rollout_wake":
            assert not self.there & set(args[0]), "taken twice"
            self.there |= set(args[0])
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
        self.device = Device()
        config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
        layout = Layout({"a": TensorSpec("U8", (nbytes,))}, {}, {})
        launched: Any = SimpleNamespace(
            llm=self.device, config=config, layout=layout, steps=Steps(), cpu=False
        )
        labels = Labels()
        steering = self.steering = Steering(launched, Gate(2), labels)
        self.versions = Versions(launched, steering, labels, EngineOptions(Path("model")))

    @property
    def there(self) -> set[str]:
        """What is there, as the device has it and as the worker is told."""
        told = self.versions.resident()
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
    assert sleeper.device.loads == (1 if level == 2 else 0)
    await sleeper.versions.commit(V1, await sleeper.refill(), "recompute")
    assert sleeper.there == {"weights"}
    await sleeper.wake("kv_cache")
    assert sleeper.there == set(BOTH)


@pytest.mark.parametrize("level", [1, 2])
async def test_weights_that_wake_without_values_get_them_from_the_commit_alone(
    level: Literal[1, 2],
) -> None:
    sleeper = Sleeper()
    await sleeper.sleep(level, *BOTH)
    for _ in range(2):
        await sleeper.wake_empty("weights")
        assert sleeper.there == {"weights"}
    await sleeper.wake_empty("kv_cache")
    assert sleeper.there == set(BOTH)
    assert not sleeper.steering.may_step, "there are no weights to step with"
    await sleeper.versions.commit(V1, await sleeper.refill(), "recompute")
    assert sleeper.steering.may_step
    assert (sleeper.there, sleeper.device.loads) == (set(BOTH), 1)


async def test_weights_without_values_fall_asleep_and_wake_from_their_source() -> None:
    sleeper = Sleeper()
    await sleeper.sleep(2, *BOTH)
    await sleeper.wake_empty("weights")
    await sleeper.sleep(2, "weights")
    assert sleeper.there == set()
    await sleeper.wake(*BOTH)
    assert (sleeper.there, sleeper.device.loads) == (set(BOTH), 1)
    assert sleeper.steering.may_step


async def test_a_cache_that_went_along_comes_back_with_the_weights() -> None:
    """On a GPU vLLM can't give weights back alone."""
    sleeper = Sleeper()
    await sleeper.sleep(1, "weights")
    assert sleeper.there == set()
    await sleeper.wake("weights")
    assert sleeper.there == set(BOTH)


@pytest.mark.parametrize("first", ["kv_cache", "weights"])
async def test_a_cache_that_was_put_to_sleep_itself_stays(first: MemoryTag) -> None:
    sleeper = Sleeper()
    await sleeper.sleep(1, first)
    await sleeper.sleep(1, *(tag for tag in BOTH if tag != first))
    await sleeper.wake("weights")
    assert sleeper.there == {"weights"}
    await sleeper.wake("kv_cache")
    assert sleeper.there == set(BOTH)


async def test_the_cache_wakes_first_if_it_is_asked_to() -> None:
    sleeper = Sleeper()
    await sleeper.sleep(2, *BOTH)
    await sleeper.wake("kv_cache")
    assert sleeper.there == {"kv_cache"}
    await sleeper.wake("weights")
    assert sleeper.there == set(BOTH)
    assert sleeper.device.loads == 1


async def test_a_copy_in_main_memory_without_room_is_refused_before_it_is_made() -> None:
    """vLLM asks for it without a look: the kernel would end the worker."""
    sleeper = Sleeper(nbytes=1 << 60)
    with pytest.raises(EngineError, match=rf"no room for {1 << 60} bytes of weights"):
        await sleeper.sleep(1, *BOTH)
    assert sleeper.there == set(BOTH)
    await sleeper.sleep(2, *BOTH)
    assert sleeper.there == set()
