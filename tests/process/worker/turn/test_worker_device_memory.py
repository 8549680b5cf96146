"""Free memory of the devices: what nvidia-smi says, and what a worker makes of it in its turn."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rollout_common.turn import Turn, device_memory
from rollout_common.turn.device_memory import MIB, Free, free_memory, grows, parsed, shortfall
from rollout_worker.device_turn import DeviceTurn
from rollout_worker.engine import EngineError
from rollout_worker.observe.worker_telemetry import WorkerTelemetry
from rollout_worker.schemas import Progress
from tests.support.unit.tiny_worker import settings
from tests.support.waiting import until

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


def test_memory_that_is_missing_is_named() -> None:
    need = {"GPU 0": 60 * GIB}
    assert shortfall(gpu(60), need) is None
    assert shortfall({}, need) is None
    assert shortfall(gpu(10), {}) is None
    assert shortfall(gpu(40, 80), need) == (
        "GPU 0 has 40.0 of 80.0 GiB free, 60.0 GiB are needed: 20.0 GiB are missing"
    )


def test_memory_grows_while_a_driver_takes_it_back() -> None:
    assert grows(gpu(41), gpu(40))
    assert not grows(gpu(40), gpu(40))
    assert not grows(gpu(39), gpu(40))


async def test_without_nvidia_smi_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert await free_memory() == {}


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the program of a script."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}")
        program.chmod(0o755)

    return make


TELLS = f"cat <<'END'\n{TOLD}END\n"


async def test_nvidia_smi_is_asked(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(TELLS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert await free_memory() == {"GPU 0": Free(81000 * MIB, 81559 * MIB)}


async def test_nvidia_smi_that_does_not_end_is_not_waited_for(
    tmp_path: Path, nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its child keeps its output open, as one does that waits for a driver."""
    nvidia_smi(f"sleep 60 &\necho $! > {tmp_path}/child\nwait\n")
    monkeypatch.setattr(device_memory, "NVIDIA_SMI_SECONDS", 0.5)
    monkeypatch.setattr(device_memory, "KILL_SECONDS", 0.2)
    try:
        async with asyncio.timeout(5):
            assert await free_memory() == {}
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
        await asyncio.sleep(0.2)  # the end of its output


class Device:
    """A device whose free memory is what the test says, look by look; the last one stays."""

    def __init__(self, *looks: Mapping[str, Free]) -> None:
        self.looks = list(looks)

    async def __call__(self) -> Mapping[str, Free]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """80 GiB, all of it free, which counts at once: nothing more can come."""
    monkeypatch.setattr(device_memory, "MEMORY_QUIET_SECONDS", 0)
    return Device(gpu(80, 80))


def turn_on(device: Device, directory: Path, *flags: str, seconds: float = 30) -> DeviceTurn:
    words = ("--turn-directory", str(directory), "--turn-devices", "gpu-0", *flags)
    return DeviceTurn(settings(*words), WorkerTelemetry(), device, seconds)


async def test_a_first_load_waits_while_memory_still_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "MEMORY_QUIET_SECONDS", 0.1)
    device = Device(gpu(10), gpu(40), gpu(90), gpu(90))
    turn, told = turn_on(device, tmp_path), list[Progress]()
    assert await turn.take(told.append)
    assert device.looks == [gpu(90)]
    assert "waiting for memory: it still grows" in str(told[-1].message)
    turn.close()


async def test_a_driver_that_begins_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for worker and trainer: two looks without growth prove nothing."""
    for name in ("MEMORY_POLL_SECONDS", "MEMORY_QUIET_SECONDS"):
        monkeypatch.setattr(device_memory, name, getattr(device_memory, name) / 4)
    device = Device(*[gpu(20)] * 5, gpu(50), gpu(80))
    assert await device_memory.wait_for_memory({}, look=device) == (None, gpu(80))


async def test_time_ends_a_wait_for_memory_that_still_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_memory, "MEMORY_QUIET_SECONDS", 60)
    device = Device(*(gpu(n) for n in range(90)))
    why, now = await device_memory.wait_for_memory({}, 0.3, look=device)
    assert why == "it still grows"
    assert now["GPU 0"].free < 90 * GIB


async def used_once(turn: DeviceTurn, device: Device, *, awake: float, asleep: float) -> None:
    """A turn in which the engine loads, and leaves so much free, in GiB of 80, awake and asleep."""
    assert await turn.take(lambda _: None)
    device.looks = [gpu(awake, 80)]
    await turn.note_use()
    device.looks = [gpu(asleep, 80)]
    await turn.give_back()


@pytest.mark.parametrize("kept", [0, 3, 4.5, 5, 10, 17], ids="{} GiB".format)
async def test_what_a_trainer_keeps_for_good_stops_nobody_while_the_engine_fits(
    tmp_path: Path, device: Device, kept: float
) -> None:
    """Contexts and NCCL's buffers of a Megatron trainer: 7 to 10 GB of 80, made after the engine's first turn."""
    turn = turn_on(device, tmp_path, seconds=0.1)
    for _ in range(3):
        await used_once(turn, device, awake=18, asleep=77)  # 59 GiB of weights and KV cache
        device.looks = [gpu(77 - kept, 80)]
    assert await turn.take(lambda _: None)
    turn.close()


async def test_an_engine_that_does_not_fit_waits_and_says_what_is_missing(
    tmp_path: Path, device: Device
) -> None:
    turn = turn_on(device, tmp_path, seconds=0.3)
    await used_once(turn, device, awake=18, asleep=77)
    device.looks, told = [gpu(57, 80)], list[Progress]()
    other = Turn(tmp_path, ["gpu-0"], "trainer-0")
    await other.take_async(5)
    taking = asyncio.create_task(turn.take(told.append))
    await until(lambda: turn.view().state == "Waiting" and told, what="it waits for the lock")
    other.give()
    # 59 GiB that its sleep freed and the margin of half a GiB; of what is taken, 3 GiB are its own.
    numbers = (
        "GPU 0 has 57.0 of 80.0 GiB free, 59.5 GiB are needed: 2.5 GiB are missing; "
        "other processes keep 20.0 GiB \\(trainer-0 had the devices before\\)"
    )
    with pytest.raises(EngineError, match=f"no room to wake: {numbers}.*NCCL"):
        await taking
    assert re.search(f"waiting for memory: {numbers}", str(told[-1].message))
    assert turn.view().state == "Released"
    residue = 'rollout_worker_turn_residue_bytes{device="GPU 0"'
    page = turn._telemetry.render_page("").decode()  # type: ignore[union-attr]
    assert float(re.search(f"{residue}.*}} (.*)", page)[1]) == 20 * GIB  # type: ignore[index]
    turn.close()


@pytest.mark.parametrize(("margin", "fits"), [("1Gi", True), ("3Gi", False)])
async def test_the_margin_is_a_flag(
    tmp_path: Path, device: Device, margin: str, fits: bool
) -> None:
    turn = turn_on(device, tmp_path, "--turn-margin", margin, seconds=0.1)
    await used_once(turn, device, awake=18, asleep=77)
    device.looks = [gpu(61, 80)]
    if fits:
        assert await turn.take(lambda _: None)
    else:
        with pytest.raises(EngineError, match=r"62\.0 GiB are needed"):
            await turn.take(lambda _: None)
    turn.close()


async def test_the_margin_asks_for_no_more_than_there_ever_was(
    tmp_path: Path, device: Device
) -> None:
    turn = turn_on(device, tmp_path, seconds=0.1)
    await used_once(turn, device, awake=0.1, asleep=77)
    assert await turn.take(lambda _: None)
    turn.close()


async def test_an_engine_that_leaves_little_is_not_stopped_by_some_megabytes(
    tmp_path: Path, device: Device
) -> None:
    turn = turn_on(device, tmp_path, seconds=0.1)
    for missing in (0.1, 0.0, 0.05, 0.2):
        await used_once(turn, device, awake=0.4, asleep=73)
        device.looks = [gpu(73 - missing, 80)]
    assert await turn.take(lambda _: None)
    turn.close()


async def test_that_nobody_can_look_is_said_once(
    nvidia_smi: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    nvidia_smi(TELLS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    monkeypatch.setattr(device_memory, "_logged", set[str]())
    for _ in range(2):
        assert await free_memory() == {}
    assert [each.getMessage() for each in caplog.records] == [
        "nvidia-smi lists no free memory of the devices in CUDA_VISIBLE_DEVICES (MIG-1234), as for parts of a GPU (MIG),"
        " so nobody can check that an earlier holder's memory is back: the locks alone decide"
    ]


async def test_on_cpus_nobody_looks(tmp_path: Path) -> None:
    device = Device(gpu(1), gpu(2), gpu(3))
    turn = turn_on(device, tmp_path, "--device", "cpu")
    assert await turn.take(lambda _: None)
    assert len(device.looks) == 3
    turn.close()
