"""Free memory of the devices: what nvidia-smi says, and what a worker makes of it in its turn."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from rollout_worker.core.device_turn import DeviceTurn
from rollout_worker.engine import EngineError
from rollout_worker.observe.telemetry import Telemetry
from rollout_worker.schemas import Progress
from rollout_worker.turn.memory import MIB, Free, free_memory, grows, missing, parsed
from tiny_worker import settings

TOLD = """\
0, GPU-aaaa-1, 81000, 81559
1, GPU-bbbb-2, 512, 81559
2, GPU-cccc-3, [N/A], [N/A]
"""
GIB = 1 << 30


def gpu(free: float, total: float = 100) -> dict[str, Free]:
    """One device, in GiB."""
    return {"GPU 0": Free(int(free * GIB), int(total * GIB))}


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ["GPU 0", "GPU 1"]),
        ("1", ["GPU 1"]),
        ("1, 0", ["GPU 0", "GPU 1"]),
        ("GPU-bbbb", ["GPU 1"]),
        ("2", []),
        ("", []),
    ],
    ids=["all", "one", "two", "uuid", "lost", "none"],
)
def test_devices_that_this_process_sees_are_counted(
    visible: str | None, devices: list[str]
) -> None:
    found = parsed(TOLD, visible)
    assert list(found) == devices
    if "GPU 1" in found:
        assert found["GPU 1"] == Free(512 * MIB, 81559 * MIB)


def test_what_is_no_answer_says_nothing() -> None:
    assert parsed("No devices were found\n", None) == {}
    assert parsed("", None) == {}


def test_memory_that_others_keep_is_named() -> None:
    assert missing(gpu(80), gpu(80)) is None
    assert missing(gpu(76), gpu(80)) is None
    assert missing(gpu(90), gpu(80)) is None
    assert missing({}, gpu(80)) is None
    assert missing(gpu(40), gpu(80)) == (
        "GPU 0 has 40.0 GiB free, 80.0 GiB when this engine had it last"
    )


def test_memory_grows_while_a_driver_takes_it_back() -> None:
    assert grows(gpu(41), gpu(40))
    assert not grows(gpu(40), gpu(40))
    assert not grows(gpu(39), gpu(40))


async def test_without_nvidia_smi_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert await free_memory() == {}


async def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{TOLD}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert await free_memory() == {"GPU 0": Free(81000 * MIB, 81559 * MIB)}


class Device:
    """A device whose free memory is what the test says, look by look; the last one stays."""

    def __init__(self, *looks: Mapping[str, Free]) -> None:
        self.looks = list(looks)

    async def __call__(self) -> Mapping[str, Free]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


def turn_on(device: Device, directory: Path, *flags: str, seconds: float = 30) -> DeviceTurn:
    words = ("--turn-directory", str(directory), "--turn-devices", "gpu-0", *flags)
    return DeviceTurn(settings(*words), Telemetry(), asyncio.sleep, device, seconds)


async def test_a_first_load_waits_while_memory_still_comes_back(tmp_path: Path) -> None:
    device = Device(gpu(10), gpu(40), gpu(90), gpu(90))
    turn, told = turn_on(device, tmp_path), list[Progress]()
    assert await turn.take(told.append)
    assert device.looks == [gpu(90)]
    assert told[-1].message == "waiting for memory of the devices: it still grows"
    turn.close()


async def test_waking_waits_for_what_the_engine_left_free(tmp_path: Path) -> None:
    device = Device(gpu(90))
    turn, told = turn_on(device, tmp_path), list[Progress]()
    assert await turn.take(told.append)
    await turn.give_back()
    told.clear()
    device.looks = [gpu(20), gpu(20), gpu(90)]
    assert await turn.take(told.append)
    assert "20.0 GiB free, 90.0 GiB when this engine had it last" in told[-1].message
    turn.close()


async def test_memory_that_does_not_come_back_gives_the_turn_up_again(
    tmp_path: Path,
) -> None:
    device = Device(gpu(90))
    turn = turn_on(device, tmp_path, seconds=0.1)
    assert await turn.take(lambda _: None)
    await turn.give_back()
    device.looks = [gpu(20)]
    with pytest.raises(EngineError, match="gave it back, but not its memory"):
        await turn.take(lambda _: None)
    assert turn.view().state == "Released"
    turn.close()


async def test_on_cpus_nobody_looks(tmp_path: Path) -> None:
    device = Device(gpu(1), gpu(2), gpu(3))
    turn = turn_on(device, tmp_path, "--device", "cpu")
    assert await turn.take(lambda _: None)
    assert len(device.looks) == 3
    turn.close()
