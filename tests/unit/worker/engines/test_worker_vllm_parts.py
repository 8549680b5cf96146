"""The parts of the vLLM adapter that need no vLLM."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_common.turn.sharing import SOCKET
from rollout_worker.engine import EngineError, EngineRequest, GangMembership, InvalidRequest
from rollout_worker.engines import EngineOptions, model_folder, network
from rollout_worker.engines.model_folder import start_while_hashing
from rollout_worker.engines.picture_model import PictureModel
from rollout_worker.engines.sglang import settings as of_sglang
from rollout_worker.engines.vllm import launch, settings, under_ray
from rollout_worker.engines.vllm.intake import VllmModel, check_request
from rollout_worker.engines.vllm.launch import StepCounter
from rollout_worker.engines.vllm.steering import SchedulerControl
from rollout_worker.engines.vllm.vllm_engine import VllmEngine
from rollout_worker.engines.vllm.vllm_streams import VllmStream, WeightLabels, split_logprobs
from rollout_worker.observe.processes import (
    StandstillDetector,
    find_descendants,
    find_process,
    kill_processes,
)
from rollout_worker.schemas import Progress, SamplingParams, StopReason, WeightsId
from rollout_worker.sources.source_reading import ReadCancelled
from tests.support.unit.tiny_engine import write_weights
from tests.support.waiting import until_sync


def commit(labels: WeightLabels, version: int, *, kept: bool) -> None:
    labels.adopt_label(labels.make_label(WeightsId(epoch=1, version=version), kept=kept))


def test_spans_follow_the_labels() -> None:
    labels = WeightLabels()
    commit(labels, 1, kept=True)
    commit(labels, 2, kept=False)
    starts = [("0", 0), ("1", 4), ("2", 6)]
    spans = [
        (s.epoch, s.version, s.start, s.end, s.stale_kv) for s in labels.token_spans(starts, 2, 9)
    ]
    assert spans == [(0, 0, 2, 4, False), (1, 1, 4, 6, True), (1, 2, 6, 9, False)]
    assert labels.token_spans(starts, 4, 4) == ()
    assert labels.current_weights == WeightsId(epoch=1, version=2)
    began_later = labels.token_spans([("1", 0)], 0, 3)
    assert [span.stale_kv for span in began_later] == [False], "it never had KV of older weights"


def test_a_label_that_was_never_adopted_means_nothing() -> None:
    labels = WeightLabels()
    lost = labels.make_label(WeightsId(epoch=1, version=1), kept=True)
    assert labels.make_label(WeightsId(epoch=1, version=2), kept=True) == lost
    assert labels.current_weights == WeightsId(epoch=0, version=0)


def test_a_token_without_a_finite_logprob_names_the_weights_that_made_it() -> None:
    labels = WeightLabels()
    commit(labels, 1, kept=True)
    request = EngineRequest("r", (1,), SamplingParams(max_tokens=8), "sampling")
    stream = VllmStream(request, 0, None)
    spans = [SimpleNamespace(version="0", start=0), SimpleNamespace(version="1", start=1)]
    completion = SimpleNamespace(
        token_ids=[7, 8],
        logprobs=SimpleNamespace(logprobs=[-0.5, float("nan")]),
        weight_versions=spans,
        finish_reason=None,
    )
    delta = stream.take_output(SimpleNamespace(outputs=[completion], num_cached_tokens=0), labels)
    assert (delta.token_ids, delta.stop_reason) == ((7,), StopReason.ABORTED)
    assert delta.not_finite == WeightsId(epoch=1, version=1)


def steering_of(
    limit: int, core: object = None, steps: StepCounter | None = None
) -> SchedulerControl:
    """What admits outputs to a vLLM of which only this is there."""
    launched: Any = SimpleNamespace(
        llm=SimpleNamespace(engine_core=core), steps=steps or StepCounter(), model=MODEL
    )
    return SchedulerControl(launched, limit, WeightLabels())


def waiting(name: str, priority: int = 0, arrival: int = 0) -> VllmStream:
    request = EngineRequest(name, (1,), SamplingParams(), None, priority=priority)
    return VllmStream(request, arrival, None)


async def test_what_gives_up_waiting_is_not_admitted() -> None:
    steering = steering_of(2)
    steering.admission_held = True
    await steering.sync_scheduler()
    streams = {name: waiting(name, 0, arrival) for arrival, name in enumerate("abcde")}
    tasks = {
        name: asyncio.create_task(steering.wait_for_admission(stream))
        for name, stream in streams.items()
    }
    await asyncio.sleep(0)
    assert steering.running == frozenset()
    streams["a"].stop_waiting()
    tasks["b"].cancel()
    await asyncio.wait([tasks["a"], tasks["b"]], timeout=1)
    assert tasks["a"].done()
    steering.admission_held = False
    await steering.sync_scheduler()
    await asyncio.gather(tasks["c"], tasks["d"])
    assert steering.running == {"c", "d"}, "vLLM runs no more at once"
    tasks["e"].cancel()


def test_descendants_are_found_and_ended() -> None:
    nest = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    before = find_descendants(os.getpid())
    with subprocess.Popen([sys.executable, "-c", nest]) as child:
        until_sync(
            lambda: len(find_descendants(os.getpid()) - before) == 2, 20, what="both processes"
        )
        found = find_descendants(os.getpid()) - before
        assert child.pid in {process.pid for process in found}
        assert kill_processes(found, 10) == set()
    assert not any(process.is_alive() for process in found)
    assert find_descendants(os.getpid()) - before == set()


MODEL = VllmModel(max_length=64, vocab_size=100, eos_token_ids=frozenset({2}), tokenizer=None)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"data_parallel_size": 2}, "parallelism.data: .* on one node only"),
        (
            {"distributed_executor_backend": "ray"},
            "ray keeps all ranks in one container: remove it",
        ),
        ({"tensor_parallel_size": 3}, "3 ranks can't be spread over 2 nodes"),
    ],
)
def test_what_does_not_go_over_several_nodes_is_refused(given: dict[str, Any], why: str) -> None:
    one = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data")}
    free = {"nnodes": 1, "node_rank": 0, "distributed_executor_backend": None}
    gang = GangMembership(nodes=2, rank=0, leader="a-0", port=8003, slots=Path("slots"))
    with pytest.raises(EngineError, match=why):
        settings._apply_parallelism(
            argparse.Namespace(**{**one, **free, **given}), frozenset(one), gang
        )


def test_a_node_knows_its_own_address_and_interface() -> None:
    """What engines would guess from the host's name may be loopback, which no other node reaches."""
    assert network.own_address("127.0.0.1") == "127.0.0.1"
    assert network.find_interface("127.0.0.1") == "lo"
    assert network.resolve_address("localhost", lambda: False) in ("127.0.0.1", "::1")
    with pytest.raises(ReadCancelled):
        network.resolve_address("no-such-host.invalid", lambda: True)
    with pytest.raises(EngineError, match=r"no network interface has the address 203.0.113.7"):
        network.find_interface("203.0.113.7")


def test_an_interface_that_the_environment_names_is_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is found by a second IPv4 address of an interface."""
    monkeypatch.setattr(os, "environ", {**os.environ, "GLOO_SOCKET_IFNAME": "fabric0"})
    for module in (launch, of_sglang):
        monkeypatch.setattr(module, "own_address", lambda _: "203.0.113.7")
    gang = GangMembership(nodes=2, rank=1, leader="127.0.0.1", port=8003, slots=tmp_path)
    given = settings.VllmSettings(120.0, argparse.Namespace(), frozenset())
    launch._join_gang(gang, given, lambda: False)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "fabric0"
    options = EngineOptions(model=tmp_path, gang=gang)
    environ = of_sglang.child_environment(options, cpu=True)
    assert environ["GLOO_SOCKET_IFNAME"] == "fabric0"


def test_a_process_that_stays_stopped_is_told_from_one_that_a_debugger_held() -> None:
    """One look at a rank must not end its gang."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            (found,) = {each for each in find_descendants(os.getpid()) if each.pid == child.pid}
            assert found == find_process(child.pid)
            standing = StandstillDetector()
            assert standing.find_stopped([found], 0.0) is None
            child.send_signal(signal.SIGSTOP)
            until_sync(found.is_stopped, what="the signal")
            assert found.is_alive(), "which is why it has to be looked at"
            assert standing.find_stopped([found]) is None, "not for a moment"
            until_sync(lambda: standing.find_stopped([found], 0.2) == found, what="a while")
            child.send_signal(signal.SIGCONT)
            until_sync(lambda: not found.is_stopped(), what="the signal")
            assert standing.find_stopped([found], 0.0) is None
            child.send_signal(signal.SIGSTOP)
            until_sync(found.is_stopped, what="the signal")
            assert standing.find_stopped([found], 0.2) is None, "it counts anew"
        finally:
            child.kill()


def test_the_kv_cache_has_room_for_a_drafts_keys_and_for_large_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the longest request fits; on GPUs vLLM chooses blocks of 64 or 128 tokens for some attention, later."""

    def model(layers: int) -> Any:
        return SimpleNamespace(
            max_model_len=1024,
            use_mla=False,
            dtype=SimpleNamespace(itemsize=2),
            get_num_kv_heads=lambda _: 2,
            get_head_size=lambda: 8,
            get_num_layers=lambda _: layers,
        )

    def bound_tokens(drafts: Any, *, cpu: bool) -> float:
        """Return how many tokens of a layer fit."""
        monkeypatch.setattr(launch, "_runs_on_cpu", lambda: cpu)
        cache = SimpleNamespace(kv_cache_memory_bytes=None, block_size=16, cache_dtype="auto")
        config = SimpleNamespace(
            model_config=model(4),
            parallel_config=None,
            cache_config=cache,
            speculative_config=drafts,
        )
        launch._bound_kv_cache(config, EngineOptions(model=tmp_path, max_batch_tokens=1024))
        assert cache.kv_cache_memory_bytes is not None
        return float(cache.kv_cache_memory_bytes / (2 * 2 * 8 * 2))

    draft = SimpleNamespace(
        method="draft_model", draft_model_config=model(2), draft_parallel_config=None
    )
    assert bound_tokens(None, cpu=True) == 4 * (65 + 1) * 16, "vLLM is told of one token more"
    assert bound_tokens(draft, cpu=True) == 6 * (65 + 1) * 16
    assert bound_tokens(SimpleNamespace(method="ngram"), cpu=True) == 4 * (65 + 1) * 16
    assert bound_tokens(None, cpu=False) >= 4 * (-(-1025 // 128) + 1) * 128


def test_a_stopped_process_of_an_idle_vllm_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a data-parallel rank without outputs: it owes no step."""
    monkeypatch.setattr(StandstillDetector.find_stopped, "__defaults__", (0.2,))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            rank = find_process(child.pid)
            launched = SimpleNamespace(llm=SimpleNamespace(errored=False), vital={rank})
            steering = SimpleNamespace(idle_since=lambda: None)
            engine: Any = object.__new__(VllmEngine)
            engine._ended, engine._standing = None, StandstillDetector()
            engine._parts = SimpleNamespace(launched=launched, steering=steering)
            engine._settings = SimpleNamespace(step_deadline_seconds=60.0)
            assert engine.alive() is None
            child.send_signal(signal.SIGSTOP)
            until_sync(lambda: engine.alive() is not None, what="a while")
            assert engine.alive() == "one of vLLM's processes was stopped"
        finally:
            child.kill()


def ray_flags(**given: object) -> argparse.Namespace:
    flags = {"data_parallel_backend": "mp", "data_parallel_size": 1}
    return argparse.Namespace(**{**flags, "distributed_executor_backend": "ray", **given})


@pytest.mark.parametrize(
    ("given", "variable", "why"),
    [
        ({"data_parallel_backend": "ray"}, "1", "--data-parallel-backend ray makes vLLM's cores"),
        ({"data_parallel_size": 2}, "1", "set parallelism.data to 1"),
        ({}, "0", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 chooses an executor that notices no dead"),
        ({}, "1", "Ray is not installed here"),
    ],
)
def test_what_ray_would_do_behind_the_workers_back_is_refused(
    given: dict[str, Any], variable: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(under_ray.EXECUTOR_VARIABLE, variable)
    monkeypatch.setattr(sys, "path", [])  # where no Ray is
    with pytest.raises(EngineError, match=why):
        under_ray.check_executor(ray_flags(**given))
    under_ray.check_executor(ray_flags(distributed_executor_backend="mp"))


def test_ray_is_refused_where_devices_are_had_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET, "/nowhere/turn")
    with pytest.raises(EngineError, match="can't share the turn for the devices"):
        under_ray.check_executor(ray_flags())


def test_a_device_that_ray_does_not_schedule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(under_ray.HEAD_VARIABLE, "")
    with pytest.raises(EngineError, match="no ranks under Ray on cpu: leave it out"):
        under_ray.prepare_ray(SimpleNamespace(ray_device_key="", device_name="cpu"))
    under_ray.prepare_ray(SimpleNamespace(ray_device_key="GPU", device_name="cuda"))
    assert os.environ[under_ray.HEAD_VARIABLE].startswith(f"{os.getpid()}.")


class Ranks:
    """Ranks of Ray: those `away` are on another node, and reach nothing of this process."""

    def __init__(self, away: int) -> None:
        self._away = away

    async def collective_rpc(self, method: str, args: tuple[str, str]) -> list[int | None]:
        assert method == "rollout_reach"
        with open(args[0]) as file:  # noqa: ASYNC230 - it is memory
            assert file.read() == args[1]
        return [*[os.getpid()] * (2 - self._away), *[None] * self._away]


async def test_ranks_that_read_our_memory_are_watched_and_others_refused() -> None:
    assert await under_ray.find_rank_processes(Ranks(away=0)) == {find_process(os.getpid())}
    with pytest.raises(EngineError, match="Ray put rank 1 where it can't read the worker's memory"):
        await under_ray.find_rank_processes(Ranks(away=1))


def test_a_failed_start_is_told_before_the_checkpoint_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes minutes with a large one."""

    def endless(folder: Path, report: object, cancelled: Callable[[], bool]) -> str:
        until_sync(cancelled, what="the start's failure")
        raise ReadCancelled

    def start() -> None:
        raise EngineError("no such device")

    monkeypatch.setattr(model_folder, "hash_checkpoint", endless)
    with pytest.raises(EngineError, match="no such device"):
        start_while_hashing(tmp_path, lambda _: None, lambda: False, start, lambda _: None)


def test_what_was_started_ends_with_a_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    ended: list[str] = []
    write_weights(tmp_path, 7)
    report: list[Progress] = []
    started, root_hash = start_while_hashing(
        tmp_path, report.append, lambda: False, lambda: "it", ended.append
    )
    assert (started, root_hash.partition(":")[0], ended) == ("it", "xxh3_128_tree", [])
    assert report[-1].message == "starting vLLM's processes"
    with pytest.raises(ReadCancelled):
        start_while_hashing(tmp_path, report.append, lambda: True, lambda: "it", ended.append)
    assert ended == ["it"]


@dataclass
class SlowCore:
    """Where vLLM's core would be: it answers when it is let."""

    answers: asyncio.Event = field(default_factory=asyncio.Event)

    async def pause_scheduler_async(self, **_: object) -> None:
        await self.answers.wait()

    async def resume_scheduler_async(self) -> None:
        await self.answers.wait()


async def test_a_core_owes_a_step_until_it_has_said_that_it_rests() -> None:
    core, steps, stream = SlowCore(), StepCounter(), waiting("r")
    steering = steering_of(2, core, steps)
    steering.streams["r"] = stream
    assert steering.idle_since() is None
    await steering.wait_for_admission(stream)
    assert steering.idle_since() == steps.last
    steering.paused = True
    pausing = asyncio.create_task(steering.sync_scheduler())
    await asyncio.sleep(0.01)
    told = steering.idle_since()
    assert told is not None
    assert told >= steps.last
    steering.note_ended("r")
    assert steering.idle_since() == told, "also when nothing is left to step for"
    core.answers.set()
    await pausing
    assert steering.idle_since() is None


async def test_the_rank_that_owes_a_step_for_longest_counts() -> None:
    """Also while another one steps; a rank without outputs owes nothing, however long ago it made a step."""
    steps, ranks = StepCounter(), {"in a": b"0", "in b": b"1", "ended": b"2"}
    steps.last, steps.last_of = 90.0, {0: 90.0, 1: 5.0}
    core = SimpleNamespace(core_engines=[b"0", b"1", b"2"], reqs_in_flight=ranks)
    steering = steering_of(8, core, steps)
    for name, inside, placed in (("a", "in a", 10.0), ("b", "in b", 60.0), ("new", None, 0.0)):
        stream = steering.streams[name] = waiting(name)
        await steering.wait_for_admission(stream)
        stream.inside, stream.placed = inside, placed
    assert steering.idle_since() == 60.0, "its first output came then"
    steps.last_of[1] = 70.0
    assert steering.idle_since() == 70.0
    steering.streams["b"].returned = True
    assert steering.idle_since() == 90.0, "the other one's"
    steering.streams["b"].returned = False
    core.pause_scheduler_async = core.resume_scheduler_async = lambda **_: asyncio.sleep(0)
    async with steering.hold_steps():
        assert steering.idle_since() is None
    since = steering.idle_since()
    assert since is not None
    assert since > 90.0, "no rank owed a step before they went on"


@pytest.mark.parametrize("shared", [True, False])
def test_graphs_and_communicators_sleep_where_others_get_the_device(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SOCKET, raising=False)
    if shared:
        monkeypatch.setenv(SOCKET, "/turn")
    options = EngineOptions(Path("model"), dtype="bfloat16")

    def found(*given: str, cpu: bool = False) -> set[str]:
        own = settings.VllmSettings(120, argparse.Namespace(), frozenset(given))
        arguments = launch._engine_arguments(options, own, cpu=cpu)
        return {flag for flag in launch.SHARED_DEVICE_FLAGS if arguments.get(flag)}

    assert found() == (set(launch.SHARED_DEVICE_FLAGS) if shared else set())
    assert "enable_nccl_comm_suspend" not in found("enable_nccl_comm_suspend"), (
        "the user's own wins"
    )
    assert found(cpu=True) == set()


@pytest.mark.parametrize(("sampled", "rank"), [(7, 1), (9, 2), (4, 5)])
def test_the_most_likely_tokens_are_read_of_joined_outputs_too(sampled: int, rank: int) -> None:
    """vLLM gives the sampled token first, again among the others; joining removes what is there twice."""
    value = {7: -0.5, 9: -1.5, 4: -4.0}[sampled]
    entries = [(sampled, value, rank), (7, -0.5, 1), (9, -1.5, 2)]
    joined = list({token: (token, value, place) for token, value, place in entries}.values())
    request = EngineRequest("r", (1,), SamplingParams(), "sampling", top_logprobs=2)
    for position in (entries, joined):
        flat = [*position, *entries]
        ids, values, ranks = map(list, zip(*flat, strict=True))
        ends = [len(position), len(flat)]
        found = SimpleNamespace(
            token_ids=ids,
            logprobs=values,
            ranks=ranks,
            start_indices=[0, ends[0]],
            end_indices=ends,
        )
        chosen, top = split_logprobs(found, 2, request)
        assert chosen == [value, value]
        assert top is not None
        assert top.to_wire(0, 2).token_ids == ((7, 9), (7, 9))
        assert top.to_wire(0, 2).logprobs == ((-0.5, -1.5), (-0.5, -1.5))


def test_placeholders_are_banned_and_counted_among_the_biases() -> None:
    pictures = PictureModel(9, frozenset({8, 9}), lambda height, width: 2, True, None)
    model = replace(MODEL, bounded=True, pictures=pictures)
    biases = dict.fromkeys(range(10, 90), 1.0)
    request = EngineRequest("r", (1,), SamplingParams(logit_bias=biases), "sampling")
    check_request(request, model)
    for prompt in ((1, 9, 9), (1, 8)):
        with pytest.raises(InvalidRequest, match="placeholders"):
            check_request(replace(request, token_ids=prompt), model)
