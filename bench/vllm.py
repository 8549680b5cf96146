"""Our worker over vLLM against vLLM's own server: same flags, same load, same kind of logprobs.

Both take and give token ids (`/v1/generate`; vLLM's `/inference/v1/generate`). Where both fit into
memory their rounds alternate, so that whatever else the machine does meets both alike.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine_kinds import CACHE, KINDS, ROOT
from rollout_worker.processes import descendants, end
from tinymodels import TinyModels, script

from .results import Figure, Options, Result

SUMMARY = "our worker over vLLM against vLLM's own server (P9)"
START_SECONDS = 400.0
FLAGS = {
    "--max-num-seqs": "64",
    "--max-num-batched-tokens": "2048",
    "--kv-cache-memory-bytes": str(512 << 20),
}
MAX_LENGTH = "1024"
PROMPT, ANSWER = 64, 64


@dataclass(frozen=True, slots=True)
class Load:
    """`total` requests with `in_flight` at once, of prompts and answers that `shape` draws."""

    label: str
    total: int
    in_flight: int
    shape: Callable[[random.Random], tuple[list[int], int]]


@dataclass(frozen=True, slots=True)
class Took:
    """What one round took: tokens a second, and each request's seconds."""

    rate: float
    latencies: list[float]

    @property
    def p50(self) -> float:
        """Median latency in milliseconds."""
        return 1000 * statistics.median(self.latencies)


@dataclass(frozen=True, slots=True)
class Server:
    """A server that generates: where, and how a request to it looks."""

    url: str
    path: str
    body: Callable[[str, list[int], int], dict[str, Any]]
    count: Callable[[dict[str, Any]], int]


def _alike(draw: random.Random) -> tuple[list[int], int]:
    return [draw.randrange(3, 4000) for _ in range(PROMPT)], ANSWER


def _short(draw: random.Random) -> tuple[list[int], int]:
    return [draw.randrange(3, 4000) for _ in range(8)], 8


def _grouped(draw: random.Random) -> tuple[list[int], int]:
    group = random.Random(draw.randrange(4))
    return [group.randrange(3, 4000) for _ in range(4 * PROMPT)], ANSWER


def _long_tailed(draw: random.Random) -> tuple[list[int], int]:
    length = min(256, max(16, int(draw.lognormvariate(4, 0.8))))
    return [draw.randrange(3, 4000) for _ in range(PROMPT)], length


def _ours(url: str) -> Server:
    def body(name: str, prompt: list[int], length: int) -> dict[str, Any]:
        sampling = {"max_tokens": length, "ignore_eos": True}
        return {"request_id": name, "token_ids": prompt, "sampling": sampling}

    return Server(url, "/v1/generate", body, lambda a: len(a["outputs"][0]["logprobs"]))


def _theirs(url: str) -> Server:
    def body(name: str, prompt: list[int], length: int) -> dict[str, Any]:
        sampling = {"max_tokens": length, "ignore_eos": True, "temperature": 1, "logprobs": 0}
        return {"request_id": name, "token_ids": prompt, "sampling_params": sampling}

    return Server(
        url,
        "/inference/v1/generate",
        body,
        lambda answer: len(answer["choices"][0]["logprobs"]["content"]),
    )


async def _round(server: Server, load: Load, seed: int) -> Took:
    draw = random.Random(seed)
    todo = [(f"b{seed}-{i}", *load.shape(draw)) for i in range(load.total)]
    latencies: list[float] = []
    tokens = 0

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal tokens
        while todo:
            name, prompt, length = todo.pop()
            began = time.perf_counter()
            answer = await client.post(server.path, json=server.body(name, prompt, length))
            latencies.append(time.perf_counter() - began)
            answer.raise_for_status()
            made = server.count(answer.json())
            assert made == length, (made, length)
            tokens += made

    limits = httpx.Limits(max_connections=load.in_flight)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        began = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(load.in_flight)))
        return Took(tokens / (time.perf_counter() - began), latencies)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _started(words: Sequence[str], ready: str, log: Path) -> Iterator[None]:
    """A server process that answers 200 at `ready`; all its processes are gone afterwards."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=env, start_new_session=True)
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(ready):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{words[2]} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield
    finally:
        family = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        end(family, 10)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def _our_server(model: Path, folder: Path) -> Iterator[Server]:
    port = _free_port()
    words = [str(KINDS["vllm"].python), "-m", "rollout_worker", "serve", "--engine", "vllm"]
    words += ["--model", str(model), "--max-length", MAX_LENGTH, "--auth", "none"]
    words += ["--data-host", "127.0.0.1", "--data-port", str(port)]
    words += ["--control-host", "127.0.0.1", "--control-port", "0"]
    words += [f"--engine-arg={flag}={value}" for flag, value in FLAGS.items()]
    url = f"http://127.0.0.1:{port}"
    with _started(words, f"{url}/ready", folder / "ours.log"):
        yield _ours(url)


@contextmanager
def _their_server(model: Path, folder: Path, dtype: str) -> Iterator[Server]:
    port = _free_port()
    words = [str(KINDS["vllm"].python), "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(model), "--max-model-len", MAX_LENGTH, "--dtype", dtype]
    words += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--enable-scale-out"]
    words += ["--no-enable-chunked-prefill", "--logprobs-mode", "processed_logprobs"]
    words += [f"{flag}={value}" for flag, value in FLAGS.items()]
    url = f"http://127.0.0.1:{port}"
    with _started(words, f"{url}/health", folder / "theirs.log"):
        yield _theirs(url)


def _half_billion() -> Path:
    """A model of the shape of Qwen2 0.5B with random weights, in bfloat16."""
    folder = CACHE / "models" / "qwen2-0.5b-shape"
    if not (folder / "tokenizer.json").exists():
        maker = script()
        shape = maker.Shape(
            vocab=151936, hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2,
            max_length=4096, dtype="bfloat16",
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        maker.make_model(folder, 1, shape)
    return folder


def run(options: Options) -> Result:
    """Run both servers through the same loads."""
    rounds = options.count(5, 2)
    tiny = TinyModels(CACHE / "models").model(1)
    loads = [
        Load("tiny, short answers one by one", 100, 1, _short),
        Load("tiny, 1,000 short requests, 64 at once", 1000, 64, _short),
        Load("tiny, 32 at once, long-tailed lengths", 96, 32, _long_tailed),
        Load("tiny, 32 at once, groups sharing a prefix", 96, 32, _grouped),
    ]
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        ours = stack.enter_context(_our_server(tiny, Path(name)))
        theirs = stack.enter_context(_their_server(tiny, Path(name), "float32"))
        for load in loads[:2] if options.quick else loads:
            figures += _compare(load, ours, theirs, rounds)
    big = [
        Load("0.5B, one by one", 4, 1, _alike),
        Load("0.5B, 8 at once", 16, 8, _alike),
        Load("0.5B, 32 at once", 64, 32, _alike),
    ]
    figures += _apart(
        big[-1:] if options.quick else big, _half_billion(), 1 if options.quick else 3
    )
    return Result(
        "vllm",
        "Our worker over vLLM against vLLM's own server",
        figures,
        notes=(
            "Goals (P9): at least 0.97 times the tokens a second, at most 2 ms more at the median.",
            "Same flags for both, eager, one OpenMP thread, log-probabilities of the sampled "
            "tokens on. Of the tiny model the rounds alternate between two live servers; of the "
            "0.5B shape one server runs at a time, so the machine's other load may differ.",
        ),
    )


def _compare(load: Load, ours: Server, theirs: Server, rounds: int) -> list[Figure]:
    """Alternate between two live servers."""
    found: dict[str, list[Took]] = {"ours": [], "theirs": []}
    for turn in range(rounds + 1):
        for name, server in (("ours", ours), ("theirs", theirs)):
            took = asyncio.run(_round(server, load, turn))
            if turn:  # the first one warms up
                found[name].append(took)
    return _figures(load, found["ours"], found["theirs"])


def _apart(loads: Sequence[Load], model: Path, rounds: int) -> list[Figure]:
    """Run one server, then the other."""

    def measure(server: Server) -> dict[str, list[Took]]:
        asyncio.run(_round(server, loads[0], 0))
        turns = range(1, rounds + 1)
        return {o.label: [asyncio.run(_round(server, o, turn)) for turn in turns] for o in loads}

    with tempfile.TemporaryDirectory() as name:
        with _our_server(model, Path(name)) as server:
            ours = measure(server)
        with _their_server(model, Path(name), "bfloat16") as server:
            theirs = measure(server)
    return [f for load in loads for f in _figures(load, ours[load.label], theirs[load.label])]


def _figures(load: Load, ours: Sequence[Took], theirs: Sequence[Took]) -> list[Figure]:
    rate, base = (statistics.median(t.rate for t in some) for some in (ours, theirs))
    mine, their = (statistics.median(t.p50 for t in some) for some in (ours, theirs))
    return [
        Figure(f"{load.label}: rate", "tok/s", rate, None, base, "vLLM's server"),
        Figure(f"{load.label}: latency", "ms", mine, None, their, "vLLM's server"),
    ]
