"""Our worker over SGLang against SGLang's own server: same flags, same load, logprobs on.

Both take and give token ids (`/v1/generate`; SGLang's `/generate`). The rounds alternate between the
two live servers, so that whatever else the machine does meets both alike.
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

from rollout_worker.engines.sglang.process import session
from tinymodels import TinyModels

from .results import Figure, Options, Result

SUMMARY = "our worker over SGLang against SGLang's own server (P9)"
ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("ROLLOUT_CACHE", ROOT / ".cache"))
PYTHON = CACHE / "env-sglang" / "bin" / "python"
START_SECONDS = 600.0
MAX_LENGTH = 1024
TOKENS = 16384
VOCAB = (3, 4000)
NOTE = (
    "Goals (P9): at least 0.97 times the tokens a second, at most 2 ms more at the median. Tiny "
    "fp32 model, torch_native attention, no overlapping schedule, one OpenMP thread."
)


@dataclass(frozen=True, slots=True)
class Load:
    """`total` requests, `at_once` of them in flight, with answers as long as `length` draws."""

    label: str
    total: int
    at_once: int
    prompt: int
    length: Callable[[random.Random], int]


LOADS = (
    Load("one by one", 40, 1, 64, lambda _: 64),
    Load("32 at once, long-tailed", 96, 32, 64, lambda d: min(256, int(d.lognormvariate(4, 0.8)))),
    Load("1,000 short, 64 at once", 1000, 64, 8, lambda _: 8),
)


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask, how a request looks, and how many tokens an answer holds."""

    url: str
    body: Callable[[list[int], int], dict[str, Any]]
    count: Callable[[Any], int]


def _ours(prompt: list[int], length: int) -> dict[str, Any]:
    sampling = {"max_tokens": length, "ignore_eos": True}
    return {"token_ids": prompt, "sampling": sampling, "logprobs": "sampling"}


def _theirs(prompt: list[int], length: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}


async def _round(server: Server, load: Load, seed: int) -> tuple[float, float]:
    """Tokens a second, and the median latency in milliseconds."""
    draw = random.Random(seed)
    todo = [
        ([draw.randrange(*VOCAB) for _ in range(load.prompt)], max(8, load.length(draw)))
        for _ in range(load.total)
    ]
    latencies: list[float] = []
    made = 0

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal made
        while todo:
            prompt, length = todo.pop()
            began = time.perf_counter()
            answer = await client.post(server.url, json=server.body(prompt, length))
            latencies.append(1000 * (time.perf_counter() - began))
            answer.raise_for_status()
            count = server.count(answer.json())
            assert count == length, (count, length)
            made += count

    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        began = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(load.at_once)))
        return made / (time.perf_counter() - began), statistics.median(latencies)


@contextmanager
def _started(words: Sequence[str], ready: str, log: Path) -> Iterator[None]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(PYTHON), *words], stdout=out, stderr=out, env=env, start_new_session=True
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(ready):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{words[1]} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        for pid in session(process.pid):
            os.kill(pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _our_server(stack: ExitStack, model: Path, folder: Path) -> Server:
    port = _free_port()
    words = ["-m", "rollout_worker", "serve", "--engine", "sglang", "--model", str(model)]
    words += ["--max-length", str(MAX_LENGTH), "--max-batch-tokens", str(TOKENS), "--auth", "none"]
    words += ["--data-host", "127.0.0.1", "--data-port", port, "--shutdown-grace", "0"]
    words += ["--control-host", "127.0.0.1", "--control-port", "0", "--log-level", "warning"]
    url = f"http://127.0.0.1:{port}"
    stack.enter_context(_started(words, f"{url}/ready", folder / "ours.log"))
    return Server(f"{url}/v1/generate", _ours, lambda a: len(a["outputs"][0]["logprobs"]))


def _their_server(stack: ExitStack, model: Path, folder: Path) -> Server:
    port = _free_port()
    words = ["-m", "sglang.launch_server", "--model-path", str(model), "--dtype", "float32"]
    words += ["--device", "cpu", "--attention-backend", "torch_native", "--host", "127.0.0.1"]
    words += [
        "--context-length",
        str(MAX_LENGTH),
        "--max-total-tokens",
        str(TOKENS),
        "--port",
        port,
    ]
    words += ["--disable-overlap-schedule", "--sleep-on-idle", "--enable-metrics"]
    url = f"http://127.0.0.1:{port}"
    stack.enter_context(_started(words, f"{url}/ready", folder / "theirs.log"))
    return Server(
        f"{url}/generate", _theirs, lambda a: len(a["meta_info"]["output_token_logprobs"])
    )


def run(options: Options) -> Result:
    """Run both servers through the same loads."""
    rounds = options.count(5, 2)
    model = TinyModels(CACHE / "models").model(1)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        servers = [make(stack, model, Path(name)) for make in (_our_server, _their_server)]
        for load in LOADS:
            found: list[list[tuple[float, float]]] = [[], []]
            for turn in range(rounds + 1):
                for server, list_ in zip(servers, found, strict=True):
                    took = asyncio.run(_round(server, load, turn))
                    if turn:  # the first one warms up
                        list_.append(took)
            rates = [statistics.median(rate for rate, _ in some) for some in found]
            waits = [statistics.median(wait for _, wait in some) for some in found]
            against = "SGLang's server"
            figures += [
                Figure(f"{load.label}: rate", "tok/s", rates[0], None, rates[1], against),
                Figure(f"{load.label}: latency", "ms", waits[0], None, waits[1], against),
            ]
    return Result("sglang", SUMMARY, figures, notes=(NOTE,))
