"""A real SGLang: weights, memory, death. What every engine must do is in the contract suite.

Its steps overlap, as on a GPU; the CPU adapter switches that off, and so does the contract suite.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from rollout_common.turn import Turn
from rollout_common.turn.sharing import SOCKET, Sharing
from rollout_worker.engine import EngineError, WeightsRejected
from rollout_worker.engines.sglang.child_connection import CallFailed
from rollout_worker.engines.sglang.process import session_processes
from rollout_worker.engines.sglang.settings import UNREAD_INTERVAL_SECONDS
from rollout_worker.engines.sglang.sglang_engine import SglangEngine
from rollout_worker.schemas import AbortReason, MemoryTag, StopReason, WeightsId
from rollout_worker.sources.checkpoint_files import open_source
from rollout_worker.sources.tensor_filling import SinkFilling
from tests.support.engine.engine_kinds import KINDS
from tests.support.engine.engine_programs import EnginePrograms
from tests.support.engine.engines import (
    PROMPT,
    V1,
    V2,
    Output,
    flip,
    follow,
    nothing,
    reaches,
    refilling,
    request,
    run,
    sglang_options,
    staged,
    update,
)
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.processes import look, shares_lock

PYTHON = KINDS["sglang"].python
STEP_DEADLINE = 3
BOTH: tuple[MemoryTag, ...] = ("weights", "kv_cache")
V3 = WeightsId(epoch=1, version=3)
OVERLAPPING = """#!/bin/bash
for word; do [ "$word" = --disable-overlap-schedule ] || words+=("$word"); done
exec {} "${{words[@]}}"
"""
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
HOOK = f"""
import importlib.abc, importlib.machinery, sys


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != {UPDATER!r}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def changed(module):
            execute(module)
            change(module)

        spec.loader.exec_module = changed
        return spec


sys.meta_path.insert(0, Finder())
"""
REFUSES_ONCE = """
from pathlib import Path

def change(updater):
    why = Path({!r})
    updater._unsupported_derived_weight_cache_error = lambda model: why.read_text() if why.exists() else None
"""
WATCHED_WHILE_PAUSED = """
import json
from types import SimpleNamespace

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components import invariant_checker

from rollout_worker.engines.sglang.child_process import patches

patches.install_patches()
found = {}
invariant_checker.WatchdogRaw = lambda **fields: found.update(fields)
scheduler = SimpleNamespace(
    is_initializing=False,
    cur_batch_for_debug=object(),
    idle_sleeper=None,
    is_fully_idle=lambda: False,
    metrics_reporter=SimpleNamespace(record_scheduler_active=lambda _: None),
)
invariant_checker.create_scheduler_watchdog(scheduler, 300.0)
running = found["is_active"]()
Scheduler._record_scheduler_state_for_paused_engine(scheduler)
print(json.dumps([running, found["is_active"]()]))
"""
ROWS = 4

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "sglang" not in os.environ.get("ROLLOUT_ENGINES", "sglang"),
        reason="ROLLOUT_ENGINES leaves sglang out",
    ),
]


def new_engine(model: Path, python: Path = PYTHON) -> SglangEngine:
    deadline = ("--step-deadline-seconds", str(STEP_DEADLINE))
    return SglangEngine(sglang_options(model, *deadline, python=python))


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The lock of a device whose turn this process shares with what it starts."""
    folder = tmp_path_factory.mktemp("turn")
    turn = Turn(folder, ["gpu-0"], "this test")
    turn.take(10)
    sharing = Sharing(turn.fileno_list)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOCKET, str(sharing.path))
        yield folder / "gpu-0"
    sharing.close()
    turn.give()


def write_fault(folder: Path, fault: str, patch: pytest.MonkeyPatch) -> None:
    """Have processes that start from now on call `change`, which `fault` defines, with the module of SGLang."""
    (folder / "sitecustomize.py").write_text(HOOK + fault)
    patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture(scope="module")
def refusal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Once this file is there, SGLang refuses updates in its words."""
    return tmp_path_factory.mktemp("refusal") / "why"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_models: TinyModels, lock: Path, refusal: Path) -> AsyncIterator[SglangEngine]:
    python = refusal.with_name("python")
    python.write_text(OVERLAPPING.format(shlex.quote(str(PYTHON))))
    python.chmod(0o755)
    engine = new_engine(tiny_models.model(1), python)
    seen: list[str] = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            write_fault(refusal.parent, REFUSES_ONCE.format(str(refusal)), patch)
            await engine.start(lambda progress: seen.append(progress.message))
        assert {"starting SGLang", "loading weights"} <= set(seen)
        assert engine.capabilities.in_flight == ("Drain", "Abort", "Recompute")
        yield engine
    finally:
        await engine.stop()


def resident(engine: SglangEngine) -> int:
    """Bytes that the child's processes hold, shared memory left out."""
    assert engine._node._process is not None
    total = 0
    for pid in engine._node._process.session_pids():
        fields = Path("/proc", str(pid), "status").read_text().splitlines()
        total += sum(int(f.split()[1]) for f in fields if f.startswith("RssAnon"))
    return total * 1024


def same(output: Output, other: Output) -> bool:
    """Whether two outputs are one, but for the order of sums (a cached prefix changes it)."""
    return output.token_ids == other.token_ids and output.logprobs == pytest.approx(
        other.logprobs, abs=1e-4
    )


async def test_its_schedulers_share_the_turn_for_the_devices(
    engine: SglangEngine, lock: Path
) -> None:
    assert engine._node._process is not None
    found = [look(pid) for pid in engine._node._process.session_pids()]
    schedulers = [p.pid for p in found if p is not None and "sglang::scheduler" in p.command]
    assert schedulers
    assert all(shares_lock(pid, lock) for pid in schedulers)


async def test_a_bad_version_is_refused_by_the_tensor_and_the_old_one_serves(
    engine: SglangEngine, tiny_models: TinyModels, reference: Reference, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    name = "model.layers.1.input_layernorm.weight"
    tensors = load_file(tiny_models.weights(2) / "model.safetensors")
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert engine._parts is not None
    layout = engine._parts.model.layout
    with pytest.raises(WeightsRejected) as refused:
        await SinkFilling(engine.open_slot, layout, lambda _: None).fill_from_files((tmp_path, ()))
    assert refused.value.tensor == name
    sink = await engine.open_slot(open_source(tmp_path).entries)
    with pytest.raises(WeightsRejected, match="sealed"):
        await engine.commit(V1, sink, "recompute")
    assert sink.nbytes == 0
    assert (await run(engine, request(max_tokens=8))).token_ids == reference.greedy(PROMPT, 8)


@pytest.fixture
def refusing(refusal: Path) -> Iterator[None]:
    refusal.write_text("a derived cache is in use")
    yield
    refusal.unlink()


@pytest.mark.usefixtures("refusing")
async def test_what_sglang_itself_says_against_updates_is_told(engine: SglangEngine) -> None:
    """As at each start; tests/unit/worker/engines/test_worker_sglang_parts.py has what becomes of it then."""
    assert engine._parts is not None
    with pytest.raises(CallFailed, match=r"OSError: .*a derived cache is in use"):
        await engine._parts.versions._call_ranks("rollout_check")
    assert engine.alive() is None
    assert len((await run(engine, request(max_tokens=4))).token_ids) == 4


async def test_a_pause_between_overlapping_steps_labels_every_token_right(
    engine: SglangEngine, tiny_models: TinyModels, reference: Reference, reference_2: Reference
) -> None:
    """The step under way when SGLang is told to rest gives each output one more token."""
    outputs = [Output() for _ in range(ROWS)]
    asked = [replace(request(f"r{n}", max_tokens=160), streamed=n == 0) for n in range(ROWS)]
    version = await staged(engine, tiny_models.weights(2))
    running = [
        asyncio.create_task(follow(engine, each, output))
        for each, output in zip(asked, outputs, strict=True)
    ]
    await asyncio.gather(*(reaches(output, 20) for output in outputs))
    await flip(engine, version.sink, V1, "recompute")
    await asyncio.gather(*running)
    for output in outputs:
        assert set(output.versions) == {(0, False), (1, False)}
        turn = output.versions.index((1, False))
        old = reference.logits(PROMPT, output.token_ids).argmax(-1).tolist()
        new = reference_2.logits(PROMPT, output.token_ids).argmax(-1).tolist()
        assert output.token_ids == [*old[:turn], *new[turn:]]


async def test_sglangs_watchdog_does_not_end_a_long_pause(sglang_programs: EnginePrograms) -> None:
    """A trainer's step takes longer than the 300 s after which it takes a step for hung."""
    assert sglang_programs.read_answer(WATCHED_WHILE_PAUSED) == [True, False]


async def test_unread_tokens_come_in_few_pieces_and_keep_their_labels(
    engine: SglangEngine, tiny_models: TinyModels, reference_2: Reference
) -> None:
    output, began = Output(), time.monotonic()
    version = await staged(engine, tiny_models.weights(3))
    unread = replace(request("unread", max_tokens=200), streamed=False)
    task = asyncio.create_task(follow(engine, unread, output))
    await reaches(output, 20)
    await asyncio.sleep(UNREAD_INTERVAL_SECONDS / 2)
    await flip(engine, version.sink, V2, "recompute")
    await task
    assert len(output.token_ids) == 200
    # The first token, the last ones and those before the pause come at once.
    assert output.deltas <= (time.monotonic() - began) / UNREAD_INTERVAL_SECONDS + 3
    turn = output.versions.index((2, False))
    before = reference_2.greedy(PROMPT, turn + 3)
    assert output.token_ids[:turn] == before[:turn]
    assert output.token_ids[turn : turn + 3] != before[turn:]
    await update(engine, tiny_models.weights(2), V3, "recompute")


async def test_memory_goes_and_comes_back_bit_for_bit(
    engine: SglangEngine, tiny_models: TinyModels
) -> None:
    active = refilling(engine, tiny_models.weights(2))
    before, held = await run(engine, request(max_tokens=16)), resident(engine)
    await engine.pause()
    await engine.sleep(1, BOTH, nothing)
    gone = held - resident(engine)
    with pytest.raises(EngineError, match="asleep"):
        await engine.resume()
    await engine.wake(BOTH, nothing)
    await engine.resume()
    assert same(await run(engine, request(max_tokens=16)), before)
    # The KV cache of a tiny model is all there is to give; the rest is libraries.
    assert engine._parts is not None
    # Keys and values, 2 layers, 2 heads of 32 floats.
    assert gone > 0.5 * engine._parts.versions._facts["max_tokens"] * 2 * 2 * 2 * 32 * 4
    await engine.pause()
    await engine.sleep(2, ["weights"], nothing)
    with pytest.raises(WeightsRejected):
        await engine.wake(["weights"], nothing)
    assert not engine.stats().resident.weights
    await engine.wake(["weights"], active)
    await engine.resume()
    assert same(await run(engine, request(max_tokens=16)), before)


async def paused_with_two_running(
    engine: SglangEngine,
) -> tuple[list[Output], list[asyncio.Task[None]]]:
    """Pause the engine while "r" and "rr" run. If they end first, as on a loaded machine, start two more.

    The state after the pause is exact: no step runs, and each token made before it has arrived.
    """
    while True:  # until the test's own timeout
        outputs = [Output(), Output()]
        tasks = [
            asyncio.create_task(follow(engine, request(name, max_tokens=200), output))
            for name, output in zip(("r", "rr"), outputs, strict=True)
        ]
        await asyncio.gather(*(reaches(output, 3) for output in outputs))
        await engine.pause()
        if engine.stats().running_ids == {"r", "rr"}:
            return outputs, tasks
        await engine.resume()
        await asyncio.gather(*tasks)


async def test_requests_aborted_while_paused_do_not_keep_memory_from_going(
    engine: SglangEngine,
) -> None:
    (running, kept), tasks = await paused_with_two_running(engine)
    assert await engine.abort(["r", "unknown"], AbortReason.CLIENT) == {"r"}
    await tasks[0]
    assert running.abort_reason is AbortReason.CLIENT
    await engine.sleep(1, ["kv_cache"], nothing)
    await engine.wake(["kv_cache"], nothing)
    await engine.resume()
    await tasks[1]
    assert kept.stop_reason is StopReason.LENGTH
    assert len(kept.token_ids) == 200


async def dies(engine: SglangEngine, how: signal.Signals) -> None:
    """End its scheduler below a request; it is noticed, and once stopped nothing is left."""
    output = Output()
    assert engine._node._process is not None
    assert engine._node._process._folder is not None
    assert engine._node._process._popen is not None
    folder, leader = engine._node._process._folder, engine._node._process._popen.pid
    try:
        scheduler = max(engine._node._process.session_pids(), key=lambda pid: pid != leader)
        task = asyncio.create_task(follow(engine, request(max_tokens=240), output))
        await reaches(output, 3)
        os.kill(scheduler, how)
        since = time.monotonic()
        while engine.alive() is None:
            assert time.monotonic() - since < (1 if how is signal.SIGKILL else STEP_DEADLINE + 1)
            await asyncio.sleep(0.02)
    finally:
        await engine.stop()
    await task
    # On a busy machine it may have made all tokens before the third was read here.
    assert output.abort_reason is AbortReason.ENGINE or len(output.token_ids) == 240
    assert len(output.token_ids) >= 3
    assert session_processes(leader) == []
    assert not folder.exists()
    assert not [name for name in os.listdir("/dev/shm") if str(leader) in name]


# A start of its own: every day tests/contract/test_contract_restarts.py stops one below requests.
@pytest.mark.soak
async def test_a_hung_scheduler_is_noticed_and_nothing_is_left(tiny_models: TinyModels) -> None:
    engine = new_engine(tiny_models.model(1))
    try:
        await engine.start(lambda _: None)
        await dies(engine, signal.SIGSTOP)
    finally:
        await engine.stop()


async def test_a_dead_scheduler_is_noticed_and_nothing_is_left(engine: SglangEngine) -> None:
    """The last one: it ends the engine of this module."""
    await dies(engine, signal.SIGKILL)
