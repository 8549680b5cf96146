"""The parts of the SGLang adapter that need no SGLang."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from rollout_common.turn.sharing import SOCKET
from rollout_worker.engine import (
    EngineCrashed,
    EngineError,
    EngineRequest,
    GangMembership,
    InvalidRequest,
    WeightsLayout,
    WeightsRejected,
)
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.request_checks import StopChecker
from rollout_worker.engines.sglang import settings
from rollout_worker.engines.sglang.child_connection import ChildConnection, encode_frame
from rollout_worker.engines.sglang.child_process.child import number_devices, numbers_for_uuids
from rollout_worker.engines.sglang.model import SglangModel, check_request, read_model
from rollout_worker.engines.sglang.process import STARTUP_MILESTONES, SglangProcess
from rollout_worker.engines.sglang.scheduling import RequestScheduler
from rollout_worker.engines.sglang.sglang_engine import SglangEngine
from rollout_worker.engines.sglang.sglang_streams import SglangStream, to_child_tokens
from rollout_worker.engines.sglang.sglang_versions import SglangAdapters, SglangVersions
from rollout_worker.engines.shared_memory.sinks import SLOTS_VARIABLE
from rollout_worker.observe.processes import command_line_of
from rollout_worker.schemas import CHECKPOINT, SamplingParams, WeightsId
from tests.support.broken_models import DAMAGE, damage
from tests.support.unit.tiny_engine import write_weights
from tests.support.waiting import until

EOS = frozenset({2})
MODEL = SglangModel(None, WeightsLayout({}, {}, {}), EOS, 64, 100, "float32", {})


def asked(temperature: float) -> EngineRequest:
    sampling = SamplingParams(temperature=temperature, max_tokens=4)
    return EngineRequest("r", (5,), sampling, "sampling")


def test_each_phase_of_a_start_is_found_in_sglangs_log() -> None:
    """The lines are those of SGLang 0.5.23."""
    lines = {
        "Load weight begin. avail mem=79.10 GB": "loading weights",
        "Load weight end. elapsed=1.52 s, type=Qwen2ForCausalLM, avail mem=78.03 GB": "weights loaded",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 9, K size: 1.00 GB": "KV cache allocated",
        "Capture target prefill CUDA graph begin. backend=full": "capturing CUDA graphs",
        "Capture target decode CUDA graph begin. backend=full": "capturing CUDA graphs",
        "Capture target decode CPU graph begin. backend=full": None,
    }
    for line, phase in lines.items():
        found = [said for words, said in STARTUP_MILESTONES.items() if words in line]
        assert found == [phase] * (phase is not None)


def test_temperatures_that_sglang_would_replace_are_refused() -> None:
    """It sets such a temperature to 1 and `top_k`, which our sampler does not read, to 1."""
    for temperature in (9e-7, 1e-300):
        with pytest.raises(InvalidRequest) as refused:
            check_request(asked(temperature), MODEL)
        assert refused.value.field == "sampling.temperature"
    for temperature in (0, 1e-6, 100):
        check_request(asked(temperature), MODEL)


@pytest.mark.parametrize(("name", "text", "said"), DAMAGE)
async def test_a_broken_model_folder_is_told_before_anything_starts(
    tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    write_weights(tmp_path, 1)
    config = {"vocab_size": 8, "max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    damage(tmp_path, name, text)
    nothing = ("--python", str(tmp_path / "nowhere"))
    engine = SglangEngine(EngineOptions(model=tmp_path, args=nothing))
    with pytest.raises(EngineError, match=said):
        await engine.start(lambda _: None)


@asynccontextmanager
async def scheduler() -> AsyncIterator[tuple[RequestScheduler, SglangStream, socket.socket]]:
    """A scheduler with one request, and the other end of its connection, where a child would be."""
    here, there = socket.socketpair()
    connection = ChildConnection(lambda frames: found.take_frames(frames))
    found = RequestScheduler(connection, 4, CHECKPOINT, SglangAdapters(connection, None))
    reading = asyncio.create_task(connection.run(here))
    await asyncio.sleep(0.01)
    stream = SglangStream(asked(1), 0, MODEL, StopChecker(asked(1).sampling, EOS, None))
    found.add_request(stream)
    yield found, stream, there
    there.close()
    await reading
    connection.fail_calls("the child is gone")


async def test_a_child_that_does_not_come_to_rest_is_stuck() -> None:
    async with scheduler() as (found, _, child):
        pausing = asyncio.create_task(found.pause())
        await asyncio.sleep(0.06)
        assert found.find_hang(60) is None
        wrong = found.find_hang(0.05)
        assert wrong is not None
        assert "rest" in wrong
        child.sendall(encode_frame({"id": 1, "result": {}}))
        await pausing
        await asyncio.sleep(0.06)
        assert found.find_hang(0.05) is None, "it rests as it was told"


async def test_a_reset_keeps_later_requests_from_earlier_prefixes() -> None:
    """Also while a request runs, when SGLang drops nothing."""
    async with scheduler() as (found, stream, child):
        resetting = asyncio.create_task(found.reset_cache())
        await asyncio.sleep(0.01)
        child.sendall(encode_frame({"id": 1, "result": False}))
        await resetting
        found.add_request(replace(stream, rid=None))
        await asyncio.sleep(0.01)
        calls = [json.loads(line) for line in child.recv(1 << 16).splitlines()]
    keys = [call["args"]["extra_key"] for call in calls if call["op"] == "generate"]
    assert keys == ["0.0.0:", "0.0.1:"]


def ended_by_sglang(status: HTTPStatus) -> dict[str, Any]:
    """An abort of its own, as its scheduler passes it on."""
    finish = {"type": "abort", "message": "too many ids", "status_code": status}
    told: dict[str, Any] = to_child_tokens("", {"meta_info": {"finish_reason": finish}})[3]
    return told


@pytest.mark.parametrize(
    ("about", "kind"),
    [
        ({"error": "ValueError: too many ids"}, InvalidRequest),
        ({"error": "RuntimeError: too many ids"}, EngineCrashed),
        (ended_by_sglang(HTTPStatus.BAD_REQUEST), InvalidRequest),
        (ended_by_sglang(HTTPStatus.INTERNAL_SERVER_ERROR), EngineCrashed),
    ],
)
async def test_an_error_of_one_request_is_no_crash(
    about: dict[str, Any], kind: type[EngineError]
) -> None:
    async with scheduler() as (_, stream, child):
        child.sendall(encode_frame({"tokens": [[stream.rid, [], None, about]]}))
        failure = await asyncio.wait_for(stream.deltas.get(), 5)
    assert type(failure) is kind
    assert "too many ids" in str(failure)


async def test_an_output_ends_before_a_logprob_that_is_not_finite() -> None:
    """With the weights that made it, and whatever reason the child has to end it."""
    about = {"finish": {"type": "length"}, "cached": 0, "retractions": 0, "queued": 0}
    diverged = WeightsId(epoch=1, version=7)
    async with scheduler() as (_, stream, child):
        stream.switch_weights(1, diverged, stale=False)
        frame = [stream.rid, [9, 9, 2], [-0.5, float("nan"), float("nan")], about]
        child.sendall(encode_frame({"tokens": [frame]}))
        made = await asyncio.wait_for(stream.deltas.get(), 5)
    assert not isinstance(made, Exception)
    assert (made.token_ids, made.logprobs, len(made.spans)) == ((9,), (-0.5,), 1)
    assert (made.stop_reason, made.abort_reason) == ("aborted", "engine")
    assert (made.stop_match, made.not_finite) == (None, diverged)


@pytest.mark.parametrize(
    "given", [(), ("--tp-size=2",), ("--tensor-parallel-size", "2"), ("--tp", "2")]
)
def test_the_ranks_are_those_of_the_pool(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    for name, count in (("TENSOR", "2"), ("PIPELINE", "1"), ("DATA", "1"), ("NODES", "1")):
        monkeypatch.setenv(f"ROLLOUT_{name}", count)
    assert settings.parse_flags(given).flags == ("--tp-size", "2")


@pytest.mark.parametrize(
    "given", [("--tp-size=4",), ("--tensor-parallel-size", "4"), ("--tp", "4")]
)
def test_other_ranks_than_the_pools_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    """The pod has as many devices as the pool's spec says."""
    assert settings.parse_flags(given).flags == ("--tp-size", "4"), (
        "without a pool it is the user's"
    )
    monkeypatch.setenv("ROLLOUT_TENSOR", "1")
    with pytest.raises(
        EngineError, match=r"spec\.parallelism\.tensor, .* which is 1: remove the flag"
    ):
        settings.parse_flags(given)


@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_ranks_that_sglang_could_not_update_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"ROLLOUT_{name.upper()}", "2")
    with pytest.raises(EngineError, match=rf"parallelism\.{name}: .* set it to 1"):
        settings.parse_flags(())


@pytest.mark.parametrize(
    ("leader", "address"),
    [
        ("pool-0-0.pool", "pool-0-0.pool:8003"),
        ("10.0.0.1", "10.0.0.1:8003"),
        ("fd00::1", "[fd00::1]:8003"),
    ],
)
def test_the_nodes_of_a_gang_meet_at_its_head(leader: str, address: str, tmp_path: Path) -> None:
    gang = GangMembership(nodes=2, rank=1, leader=leader, port=8003, slots=tmp_path / "slots")
    options = EngineOptions(model=Path("m"), device="cpu", gang=gang, spill_dir=tmp_path)
    flags = settings.child_flags(options, settings.parse_flags(()), MODEL, cpu=True)
    at = flags.index("--nnodes")
    assert flags[at : at + 6] == [
        "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", address,
    ]  # fmt: skip
    options = replace(options, gang=replace(gang, leader="127.0.0.1"))
    environ = settings.child_environment(options, cpu=True)
    assert environ["SGLANG_HOST_IP"] == "127.0.0.1"
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert environ[SLOTS_VARIABLE] == str(tmp_path / "slots")
    assert environ[settings.SPILL_FOLDER_VARIABLE] == str(tmp_path)
    options = replace(options, gang=None)
    assert "--nnodes" not in settings.child_flags(
        options, settings.parse_flags(()), MODEL, cpu=True
    )
    assert SLOTS_VARIABLE not in settings.child_environment(options, cpu=True)


def test_the_kv_cache_has_room_for_the_longest_request_in_whole_pages() -> None:
    """On GPUs SGLang chooses pages of 64 or 128 tokens for some attention."""
    for tokens in (1000, 2048):
        options = EngineOptions(model=Path("m"), max_batch_tokens=tokens)
        flags = settings.child_flags(options, settings.parse_flags(()), MODEL, cpu=False)
        given = int(flags[flags.index("--max-total-tokens") + 1])
        assert given // 128 * 128 - settings.SLACK_TOKENS >= tokens


@pytest.mark.parametrize(
    ("shared", "cpu", "own", "graphs"),
    [
        (True, False, None, "1"),
        (True, False, "0", "0"),
        (False, False, None, None),
        (True, True, None, None),
    ],
)
def test_graphs_are_given_back_with_the_weights_where_others_get_the_device(
    shared: bool, cpu: bool, own: str | None, graphs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SOCKET, raising=False)
    monkeypatch.delenv(settings.SAVE_GRAPHS_VARIABLE, raising=False)
    if shared:
        monkeypatch.setenv(SOCKET, "/turn")
    if own is not None:
        monkeypatch.setenv(settings.SAVE_GRAPHS_VARIABLE, own)
    found = settings.child_environment(EngineOptions(model=Path("m")), cpu=cpu)
    assert found.get(settings.SAVE_GRAPHS_VARIABLE) == graphs
    if graphs is not None:
        monkeypatch.setenv(settings.SAVE_GRAPHS_VARIABLE, graphs)
    more = ["cuda_graph"] if graphs == "1" else []
    assert settings.with_graph_tags(["weights", "kv_cache"]) == ["weights", "kv_cache", *more]
    assert settings.with_graph_tags(["kv_cache"]) == ["kv_cache"]


async def test_a_process_that_stays_stopped_or_ends_is_named() -> None:
    gone: list[str] = []
    watched = SglangProcess(gone.append, lambda _: None)
    child = await asyncio.create_subprocess_exec("sleep", "60")
    watched._watch_process(child.pid)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        await until(lambda: watched.find_stopped(0.2) is not None)
        assert watched.find_stopped(0.2) == f"a process of SGLang (pid {child.pid}) is stopped"
        os.kill(child.pid, signal.SIGCONT)
        await until(lambda: watched.find_stopped() is None)
    finally:
        child.kill()
        await child.wait()
    await until(lambda: bool(gone))
    assert gone == [f"a process of SGLang (pid {child.pid}) ended"]
    assert watched.find_stopped() is None


def test_uuids_of_devices_become_the_numbers_that_sglang_reads() -> None:
    told = "0, GPU-b7-a\n1, GPU-03-f\n"
    assert numbers_for_uuids("GPU-03-f,GPU-b7", told) == "1,0"
    assert numbers_for_uuids("GPU-03-f,GPU-else", told) is None
    assert numbers_for_uuids("GPU-03-f", "No devices were found") is None


def test_devices_keep_their_uuids_where_nobody_can_number_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-03-f")
    monkeypatch.setenv("PATH", str(tmp_path))
    number_devices()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-03-f"
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, GPU-b7-a'; echo '1, GPU-03-f'\n")
    smi.chmod(0o755)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    number_devices()
    assert (os.environ.pop("CUDA_DEVICE_ORDER"), os.environ["CUDA_VISIBLE_DEVICES"]) == (
        "PCI_BUS_ID",
        "1",
    )


def folder(path: Path, **quantisation: object) -> EngineOptions:
    config = {"vocab_size": 8, "quantization_config": quantisation}
    (path / "config.json").write_text(json.dumps(config))
    return EngineOptions(model=path)


def quantised(path: Path) -> SglangEngine:
    options = folder(path, quant_method="compressed-tensors", format="float-quantized")
    write_weights(path, 1)
    return SglangEngine(replace(options, max_length=8, args=("--python", "/nonexistent")))


async def test_a_kind_that_sglang_would_update_wrongly_is_refused_before_it_is_loaded(
    tmp_path: Path,
) -> None:
    engine = quantised(tmp_path)
    with pytest.raises(EngineError, match=r"'compressed-tensors'.*--self-update-check=off"):
        await engine.start(lambda _: None)


async def test_such_a_kind_may_be_served_without_updates(tmp_path: Path) -> None:
    off = quantised(tmp_path)._options
    engine = SglangEngine(replace(off, args=(*off.args, "--self-update-check=off")))
    with pytest.raises(EngineError, match="can't be started"):  # the next thing: no such Python
        await engine.start(lambda _: None)


async def test_weights_that_sglang_would_not_take_are_refused_before_they_are_staged(
    tmp_path: Path,
) -> None:
    """In its own words where it has some: it would say the same of every update."""
    options = folder(tmp_path, quant_method="fp8", weight_block_size=[128, 128])
    write_weights(tmp_path, 1)
    found = read_model(replace(options, max_length=8))
    facts = {"no_updates": None, "device": [9, 0], "ranks": 1}
    adapters = SglangAdapters(ChildConnection(print), None)
    for more, why in (
        ({"no_updates": "Online weight updates are not supported"}, "Online weight updates"),
        ({"device": [10, 0]}, r"capability 10\.0"),
    ):
        versions = SglangVersions(
            options,
            found,
            ChildConnection(print),
            RequestScheduler(ChildConnection(print), 1, CHECKPOINT, adapters),
            facts | more,
            print,
            adapters,
        )
        with pytest.raises(WeightsRejected, match=why):
            await versions.open_slot([], on_disk=False, given=None)


CHILD = """#!/bin/bash
(exec -a sglang::scheduler_TP0 sleep 300) &
sleep 300 &
wait
"""


def named(process: SglangProcess, name: str) -> list[int]:
    return [pid for pid in process.session_pids() if command_line_of(pid).startswith(name)]


async def test_only_the_end_of_what_sglang_names_ends_the_engine(tmp_path: Path) -> None:
    """Torch's compile workers quit after a minute without work."""
    python = tmp_path / "python"
    python.write_text(CHILD)
    python.chmod(0o755)
    ends: list[str] = []
    process = SglangProcess(ends.append, lambda _: None)
    process.start(str(python), (), {}).close()
    try:
        await until(lambda: named(process, "sglang::") and named(process, "sleep"))
        process.watch_schedulers()
        (helper,), (scheduler,) = named(process, "sleep"), named(process, "sglang::")
        os.kill(helper, signal.SIGKILL)
        await until(lambda: not named(process, "sleep"))
        os.kill(scheduler, signal.SIGKILL)
        await until(lambda: ends)
        assert f"pid {scheduler})" in ends[0]
    finally:
        await process.stop()


async def test_an_interpreter_that_is_not_there_is_named() -> None:
    process = SglangProcess(lambda _: None, lambda _: None)
    try:
        with pytest.raises(EngineError, match="--python '/nowhere/python' can't be started"):
            process.start("/nowhere/python", (), {})
    finally:
        await process.stop()
