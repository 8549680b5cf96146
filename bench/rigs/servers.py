"""Our worker over an engine, and the engine's own server with the same settings: two processes, their requests, their CPU time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import httpx

from rollout_worker.engines import EngineOptions
from rollout_worker.engines.sglang.model import read_model
from rollout_worker.engines.sglang.settings import child_environment, child_flags, parse_flags
from rollout_worker.observe.processes import find_descendants, kill_processes
from tests.support.engine.engine_kinds import KINDS, ROOT
from tests.support.engine.gangs import free_port_row

START_SECONDS = 600.0
TICKS = os.sysconf("SC_CLK_TCK")
MAX_LENGTH = 1024
VLLM_CACHE_BYTES, SGLANG_CACHE_TOKENS = 512 << 20, 20480
"""Of KV cache, enough for every load without a preemption."""
VLLM_FLAGS = (
    *("--max-num-seqs=64", "--max-num-batched-tokens=2048"),
    f"--kv-cache-memory-bytes={VLLM_CACHE_BYTES}",
)
SGLANG_FLAGS = ("--max-running-requests=64", "--log-level=warning")
"""Those that both sides are started with, on top of what the adapter sets by itself."""
ONLY_OURS = "--custom-weight-loader"
"""Of SGLang's flags, the adapter's own code, for updates of weights, of which the loads have none."""


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two servers: how it is started, asked, and when it is ready.

    `words(model, dtype, port)`: its command line after the interpreter. `body(prompt, length)`: a
    request. `count(answer)`: how many tokens came with their logprobs.
    """

    name: str
    words: Callable[[Path, str, int], Sequence[str]]
    ready: str
    path: str
    body: Callable[[list[int], int], Mapping[str, Any]]
    count: Callable[[Any], int]


@dataclass(frozen=True, slots=True)
class Live:
    """A running server."""

    side: Side
    url: str
    pid: int

    def cpu_seconds(self) -> float:
        pids = (self.pid, *(process.pid for process in find_descendants(self.pid)))
        return sum(map(_cpu_seconds, pids))


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def started(
    engine: str, side: Side, environ: Mapping[str, str], model: Path, dtype: str, folder: Path
) -> Iterator[Live]:
    """Run a server, ready when the block begins; all its processes end with the block."""
    port, log = free_port_row(), folder / f"{side.name}.log"
    words = [*_cores(), str(KINDS[engine].python), *side.words(model, dtype, port)]
    shared = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=out, env={**os.environ, **shared, **environ}, process_group=0
        )
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_SECONDS
        while not answers(url + side.ready):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{side.name} did not start: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield Live(side, url, process.pid)
    finally:
        _stop(process)


def _cores() -> Sequence[str]:
    """Return a command that keeps the server off one core, for the client, if there are three."""
    cores = sorted(os.sched_getaffinity(0))
    kept = cores[:-1] if len(cores) > 2 else cores
    return ["taskset", "-c", ",".join(map(str, kept))]


def _stop(process: subprocess.Popen[bytes]) -> None:
    family = find_descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    kill_processes(family, 10)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass(frozen=True, slots=True)
class Contenders:
    """Both sides of one engine, and the environment that both get. `name`: the engine's in texts."""

    engine: str
    name: str
    environ: Mapping[str, str]
    ours: Side
    theirs: Side


def _our_worker(engine: str, flags: Sequence[str], cache_tokens: int | None = None) -> Side:
    """Return our side, with the engine's own `flags` and so many tokens of KV cache."""
    cache = [] if cache_tokens is None else ["--max-batch-tokens", str(cache_tokens)]

    def words(model: Path, dtype: str, port: int) -> Sequence[str]:
        return [
            *("-m", "rollout_worker", "serve", "--engine", engine, "--model", str(model)),
            *("--device", "cpu", "--dtype", dtype, "--max-length", str(MAX_LENGTH), *cache),
            *("--auth", "none", "--shutdown-grace", "0", "--log-level", "warning"),
            *("--data-host", "127.0.0.1", "--data-port", str(port)),
            *("--control-host", "127.0.0.1", "--control-port", str(port + 1)),
            *(f"--engine-arg={flag}" for flag in flags),
        ]

    def body(prompt: list[int], length: int) -> Mapping[str, Any]:
        return {"token_ids": prompt, "sampling": {"max_tokens": length, "ignore_eos": True}}

    def count(answer: Any) -> int:
        return len(answer["outputs"][0]["logprobs"])

    return Side("ours", words, "/ready", "/v1/generate", body, count)


def _vllm_words(model: Path, dtype: str, port: int) -> Sequence[str]:
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out"),
        *("--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning"),
        *("--model", str(model), "--tokenizer", str(model), "--skip-tokenizer-init"),
        *("--dtype", dtype, "--max-model-len", str(MAX_LENGTH)),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--max-logprobs", "256"),
        *("--enforce-eager", "--no-enable-chunked-prefill", *VLLM_FLAGS),
    ]


def _vllm_body(prompt: list[int], length: int) -> Mapping[str, Any]:
    sampling = {"max_tokens": length, "ignore_eos": True, "temperature": 1, "logprobs": 0}
    return {"token_ids": prompt, "sampling_params": sampling}


def _vllm_count(answer: Any) -> int:
    return len(answer["choices"][0]["logprobs"]["content"])


def _sglang_words(model: Path, dtype: str, port: int) -> Sequence[str]:
    options = EngineOptions(
        model=model,
        dtype=cast(Literal["float32", "bfloat16"], dtype),
        max_length=MAX_LENGTH,
        device="cpu",
        max_batch_tokens=SGLANG_CACHE_TOKENS,
        args=SGLANG_FLAGS,
    )
    flags = child_flags(options, parse_flags(SGLANG_FLAGS), read_model(options), cpu=True)
    loader = flags.index(ONLY_OURS)
    return [
        *("-m", "sglang.launch_server", *flags[:loader], *flags[loader + 2 :]),
        # The child adds it by itself where memory can be given back: in the environment of the
        # tests and on GPUs.
        *("--enable-memory-saver", "--host", "127.0.0.1", "--port", str(port)),
    ]


def _sglang_body(prompt: list[int], length: int) -> Mapping[str, Any]:
    sampling = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}


def _sglang_count(answer: Any) -> int:
    return len(answer["meta_info"]["output_token_logprobs"])


VLLM = Contenders(
    engine="vllm",
    name="vLLM",
    environ={
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    },
    ours=_our_worker("vllm", VLLM_FLAGS),
    theirs=Side(
        "theirs", _vllm_words, "/health", "/inference/v1/generate", _vllm_body, _vllm_count
    ),
)
SGLANG = Contenders(
    engine="sglang",
    name="SGLang",
    environ=child_environment(EngineOptions(model=Path()), cpu=True),
    ours=_our_worker("sglang", SGLANG_FLAGS, SGLANG_CACHE_TOKENS),
    theirs=Side("theirs", _sglang_words, "/ready", "/generate", _sglang_body, _sglang_count),
)
