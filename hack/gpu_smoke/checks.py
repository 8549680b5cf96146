"""The checks, in their order: each returns its finding in a few words, or raises `Wrong`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import httpx
import torch

from rollout_client.turn import local_turn
from rollout_worker.engines.selfcheck import find_difference
from rollout_worker.schemas import SamplingParams
from tests.support.engine.judging import greedy
from tests.support.engine.lending_trainer import read_tensors
from tests.support.engine.workers import PROMPT
from tests.support.waiting import until_sync

from .latency import latency_while_staging
from .scene import CALL_SECONDS, GPU, NotHere, Scene, Wrong, version_seed

GREEDY_TOKENS = 64
COMMITS = 20
FLAT_MIB = 64.0
"""How much the memory may grow from the fifth commit to the last."""
OLD_SECONDS = 0.3
"""How long requests run on the old weights at least before a commit."""
ASLEEP_MIB = 2048.0
"""Most that a sleeping engine may hold of a GPU."""
RESTART_SECONDS = 300.0
SHARED_BYTES = 256 << 20
"""Of the device, which two processes share while the engine serves."""

Check = Callable[[Scene], str]


def started(scene: Scene) -> str:
    """The worker serves; a table of its processes is kept."""
    titles = [f"{process.pid} {process.command_line()}" for process in scene.family()]
    scene.folder.joinpath("processes.txt").write_text("\n".join(sorted(titles)) + "\n")
    return f"Ready after {scene.start_seconds:.0f} s, {len(titles)} processes below the worker"


def outputs(scene: Scene) -> str:
    """64 greedy tokens are transformers' own, and logprobs under top-p 0.9 are teacher-forced."""
    judge = scene.models.judge(scene.version)
    tokens = scene.worker.sample(GREEDY_TOKENS)["token_ids"]
    likeliest = greedy(judge, PROMPT, tokens) if scene.exact else _nearly_greedy(scene, tokens)
    if not likeliest:
        raise Wrong(f"greedy tokens differ from transformers': {tokens}")
    sampling = {"max_tokens": GREEDY_TOKENS, "top_p": 0.9, "ignore_eos": True}
    answer = scene.worker.generate(sampling=sampling, logprobs="sampling")
    if answer.status_code == 422:
        return f"{GREEDY_TOKENS} greedy tokens right; no sampling logprobs here: {answer.json()['detail']}"
    output = _one(answer)
    expected = judge.sampling_logprobs(
        PROMPT, output["token_ids"], SamplingParams.model_validate(sampling)
    )
    off = _off(output["logprobs"], expected)
    # Rounding may move a token over the edge of the nucleus: one in sixteen steps, on a GPU one in two.
    most = off[-1 - len(off) // (16 if scene.exact else 2)]
    if most > scene.tolerance:
        raise Wrong(f"logprobs under top-p 0.9 are up to {most:.2g} nats off")
    return f"{GREEDY_TOKENS} greedy tokens right, top-p logprobs within {most:.1g} nats"


def limits(scene: Scene) -> str:
    """1,025 allowed tokens are a 422 or an answer, never the end of the engine."""
    allowed = list(range(10, 10 + 1025))
    answer = scene.worker.generate(
        sampling={"max_tokens": 4, "allowed_token_ids": allowed, "ignore_eos": True}
    )
    if answer.status_code not in (200, 422):
        raise Wrong(f"1,025 allowed tokens: {answer.status_code} {answer.text}")
    scene.worker.sample(4)
    if restarts := scene.worker.state()["restarts"]:
        raise Wrong(f"the engine was restarted {restarts} times")
    return f"1,025 allowed tokens: {answer.status_code}, the engine serves on"


def commits_under_load(scene: Scene) -> str:
    """Commits while many requests run, half of them streamed: the weights of its span made each token."""
    told = []
    for policy in scene.policies:
        scene.stage()  # before they begin: a fast GPU would be done with them by then
        calls = [
            _running(scene, f"{policy}-{i}", stream=i % 2 == 0) for i in range(scene.plan.running)
        ]
        until_sync(
            lambda: scene.worker.state()["in_flight"] >= scene.plan.running // 2,
            CALL_SECONDS,
            what="half of them to run",
        )
        time.sleep(OLD_SECONDS)
        done = scene.commit(in_flight=policy, deadline_seconds=2)
        if not done["finished"] + done["aborted"] + done["kept"]:
            raise Wrong(f"nothing ran any more when {policy} committed: nothing was tried")
        found = [call.result(CALL_SECONDS) for call in calls]
        checked = sum(_judge_spans(scene, output) for output in found)
        told.append(f"{policy} {done['pause_seconds'] * 1000:.0f} ms ({checked} tokens judged)")
    return "pause " + ", ".join(told)


def there_and_back(scene: Scene) -> str:
    """Another version changes the outputs, and the first one brings them back."""
    seen, pauses = [_greedy(scene)], []
    for _ in range(2):
        pauses.append(scene.update(in_flight="Abort")["pause_seconds"])
        seen.append(_greedy(scene))
    first, other, back = seen
    if find_difference([first], [other]) is None:
        raise Wrong("another version makes the same tokens")
    if (why := find_difference([first], [back])) is not None:
        raise Wrong(f"the first version does not come back: {why}")
    each = min(pauses) / scene.version_tensors * 1e6
    return f"pause {min(pauses) * 1000:.0f} ms, {each:.0f} us for each of {scene.version_tensors} tensors"


def _greedy(scene: Scene) -> tuple[tuple[int, ...], tuple[float, ...]]:
    output = scene.worker.sample(GREEDY_TOKENS)
    return tuple(output["token_ids"]), tuple(output["logprobs"])


def many_commits(scene: Scene) -> str:
    """After 20 commits the logits are those of a fresh load, and memory has not grown."""
    seen = []
    for _ in range(COMMITS):
        scene.update(in_flight="Abort")
        seen.append(scene.memory())
    outputs(scene)
    grown = seen[-1] - seen[4]
    if grown > FLAT_MIB:
        raise Wrong(f"memory grew by {grown:.0f} MiB from commit 5 to {COMMITS}: {seen}")
    return f"{COMMITS} commits, outputs right, memory {grown:+.0f} MiB since the fifth"


def held_ahead(scene: Scene) -> str:
    """Before a commit each rank has mapped what is staged; the pause is one copy."""
    if scene.kind.in_process:
        raise NotHere("hf serves from what is staged")
    scene.stage()
    size, ranks, known = scene.held()
    if ranks < known:
        raise Wrong(f"{ranks} of {known} ranks hold the staged weights")
    pause = scene.commit(in_flight="Abort")["pause_seconds"]
    outputs(scene)
    return f"{ranks} ranks hold them, {size / pause / 2**30:.1f} GiB/s in the pause"


def sleeps(scene: Scene) -> str:
    """Both levels give memory back; a staged wake commits before the KV cache is there."""
    awake, told = scene.memory(), []
    for level in (1, 1, 2):  # the second time, what the first one took must be free again
        scene.worker.call_verb("sleep", level=level, mode="abort")
        asleep = scene.memory()
        if scene.plan.device == "cuda" and asleep - scene.memory_before > ASLEEP_MIB:
            raise Wrong(f"asleep at level {level} it holds {asleep - scene.memory_before:.0f} MiB")
        scene.worker.call_verb("wake", tags=["weights"])
        half = scene.memory()
        if not _without_cache(scene, asleep, half, awake):
            raise Wrong(f"the KV cache woke with the weights: MiB {asleep}, {half}, awake {awake}")
        scene.update(in_flight="Abort")
        scene.worker.call_verb("wake")
        outputs(scene)
        told.append(f"level {level} {asleep:.0f}, weights back {half:.0f}, {scene.memory():.0f}")
    return f"MiB awake {awake:.0f}; " + "; ".join(told)


def lent(scene: Scene) -> str:
    """An engine that sleeps reads the tensors of a trainer on the same device, and serves them once that has left."""
    version, device = scene.version + 1, torch.device(scene.plan.device)
    found = read_tensors(scene.models.folder(version_seed(version)))
    scene.worker.call_verb("sleep", level=2, mode="abort")
    with local_turn([GPU], scene.turn_directory, seconds=CALL_SECONDS) as turn:
        tensors = {name: tensor.to(device) for name, tensor in found.items()}
        began = time.monotonic()
        turn.hand_over(version, tensors.items(), epoch=1, seconds=CALL_SECONDS)
        seconds = time.monotonic() - began
        size = sum(tensor.nbytes for tensor in tensors.values())
        del tensors
        scene.memory()  # which frees what torch keeps
    scene.worker.call_verb("wake", tags=["weights"], load=False)
    scene.commit(in_flight="Abort")
    scene.worker.call_verb("wake")
    outputs(scene)
    return f"{size} bytes in {seconds:.2f} s, {size / seconds / 1e9:.1f} GB/s; outputs right"


def abort_asleep(scene: Scene) -> str:
    """A request that was frozen asleep can be aborted there, and all goes on after waking."""
    call = _running(scene, "frozen", stream=False)
    until_sync(lambda: scene.worker.state()["in_flight"] > 0, CALL_SECONDS, what="it to run")
    scene.worker.call_verb("sleep", level=1, mode="keep")
    scene.worker.call_verb("abort", all=True)
    output = call.result(CALL_SECONDS)
    if output["stop_reason"] != "aborted":
        raise Wrong(f"the frozen request ended with {output['stop_reason']}")
    scene.worker.call_verb("wake")
    outputs(scene)
    return f"aborted asleep after {len(output['token_ids'])} tokens, serves after waking"


def memory_shared(scene: Scene) -> str:
    """A process copies memory of the device that another one exported, also after that one was killed."""
    device = "cuda:0" if scene.plan.device == "cuda" else "cpu"
    done = subprocess.run(
        [sys.executable, "-m", "gpu_smoke.memory_export", device, str(SHARED_BYTES)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=CALL_SECONDS,
    )
    if done.returncode:
        raise Wrong("; ".join(done.stderr.splitlines()[-2:]))
    return done.stdout.strip()


def deaths(scene: Scene) -> str:
    """A stopped and a killed engine process are noticed, replaced, and leave no memory behind."""
    if scene.kind.in_process:
        raise NotHere("hf runs inside of the worker: its death is the pod's")
    before, told = scene.memory(), []
    for number in (signal.SIGSTOP, signal.SIGKILL):
        restarts = scene.worker.state()["restarts"]
        core = max(scene.family(), key=_resident)
        # What stands still shows by the steps that it does not make, so something has to run.
        call = _running(scene, number.name, stream=False)
        until_sync(lambda: scene.worker.state()["in_flight"] > 0, CALL_SECONDS, what="it to run")
        began = time.monotonic()
        os.kill(core.pid, number)
        try:
            until_sync(
                lambda: scene.worker.state()["restarts"] > restarts,  # noqa: B023 - called in this turn
                RESTART_SECONDS,
                what="the death to be noticed",
            )
        finally:
            if core.is_stopped():  # so that a failure here is not one of all later checks, too
                os.kill(core.pid, signal.SIGCONT)
        if (reason := call.result(CALL_SECONDS)["stop_reason"]) != "aborted":
            raise Wrong(f"what ran at {number.name} ended with {reason}")
        scene.await_active(RESTART_SECONDS)
        outputs(scene)
        told.append(f"{number.name} {time.monotonic() - began:.0f} s")
    if scene.memory() - before > FLAT_MIB + 0.1 * before:
        raise Wrong(f"memory went from {before:.0f} to {scene.memory():.0f} MiB")
    return "serves again after " + ", ".join(told)


def idle(scene: Scene) -> str:
    """A helper process that ends while the engine is idle does not count as a death."""
    restarts = scene.worker.state()["restarts"]
    time.sleep(scene.plan.idle_seconds)
    if scene.worker.state()["restarts"] != restarts:
        raise Wrong(f"restarted while idle: {scene.worker.state()['last_error']}")
    outputs(scene)
    return f"idle for {scene.plan.idle_seconds:.0f} s, not restarted"


CHECKS: dict[str, Check] = {
    "start": started,
    "outputs": outputs,
    "limits": limits,
    "commits under load": commits_under_load,
    "held ahead": held_ahead,
    "there and back": there_and_back,
    "latency": latency_while_staging,
    "20 commits": many_commits,
    "sleep": sleeps,
    "lent": lent,
    "abort asleep": abort_asleep,
    "memory shared": memory_shared,
    "deaths": deaths,
    "idle": idle,
}


def _without_cache(scene: Scene, asleep: float, half: float, awake: float) -> bool:
    """Whether only weights came back; vLLM and SGLang give most of a GPU to the cache, hf doesn't."""
    shown = scene.plan.device == "cuda" and not scene.kind.in_process
    return not shown or half - asleep < (awake - asleep) / 2


def _running(scene: Scene, name: str, *, stream: bool) -> Future[dict[str, Any]]:
    """Start a long request; its result is the output, whole or cut short."""
    body = {
        "request_id": f"{name}-{scene.version}",
        "sampling": {"max_tokens": scene.plan.length, "ignore_eos": True},
        "logprobs": "raw" if _has_raw(scene) else "sampling",
    }

    def whole() -> dict[str, Any]:
        return _one(scene.worker.generate(**body))

    def streamed() -> dict[str, Any]:
        output: dict[str, Any] = {"token_ids": [], "logprobs": [], "weights": []}
        for event, data in scene.worker.stream(**body):
            if event == "delta":
                for key in output.keys() - {"stop_reason"}:
                    output[key] += data[key] or []
            elif event == "done":
                output["stop_reason"] = data["outputs"][0]["stop_reason"]
            else:
                raise Wrong(f"a stream failed: {data}")
        return output

    return scene.worker.in_background(streamed if stream else whole)


def _judge_spans(scene: Scene, output: dict[str, Any]) -> int:
    """Teacher-force each token under the version of its span; return how many were judged.

    Tokens after another version's KV (`stale_kv`) depend on what no single model computes.
    """
    spans = output["weights"]
    ends = [0, *(span["end"] for span in spans)]
    if any(span["start"] != end for span, end in zip(spans, ends, strict=False)):
        raise Wrong(f"spans are not contiguous: {spans}")
    if any(later["version"] < earlier["version"] for earlier, later in pairwise(spans)):
        raise Wrong(f"spans go back: {spans}")
    judged = 0
    for span in spans:
        if span["stale_kv"]:
            continue
        tokens = output["token_ids"][: span["end"]]
        expected = scene.models.judge(span["version"]).raw_logprobs(PROMPT, tokens)
        off = _off(output["logprobs"][span["start"] : span["end"]], expected[span["start"] :])
        worst = max(off, default=0.0)
        if worst > 4 * scene.tolerance:
            raise Wrong(f"tokens of span {span} are {worst:.2g} nats off their weights")
        judged += span["end"] - span["start"]
    return judged


def _nearly_greedy(scene: Scene, tokens: list[int]) -> bool:
    """Whether each token is at most a rounding less likely than the likeliest."""
    logits = scene.models.judge(scene.version).logits(PROMPT, tokens)
    chosen = logits.gather(1, logits.new_tensor(tokens).long().unsqueeze(1)).squeeze(1)
    # Engine and judge both round: on an H100 they were up to 0.44 apart, and another version is 4 and more.
    return bool((chosen >= logits.max(-1).values - 2.5 * scene.tolerance).all())


def _has_raw(scene: Scene) -> bool:
    info = scene.worker.data.get("/v1/info").json()
    return "raw" in info["capabilities"]["logprobs"]


def _one(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise Wrong(f"generate: {answer.status_code} {answer.text}")
    [output] = answer.json()["outputs"]
    return dict(output)


def _off(found: list[float], expected: list[float]) -> list[float]:
    """Return by how much each differs, the smallest first."""
    return sorted(abs(f - e) for f, e in zip(found, expected, strict=True))


def _resident(process: Any) -> int:
    with open(f"/proc/{process.pid}/statm") as file:
        return int(file.read().split()[1])
