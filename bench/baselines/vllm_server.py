"""vLLM's own server, with the settings that our worker gives to its engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.rigs.servers import Side

from .our_worker import MAX_LENGTH, worker

ENGINE = "vllm"
CACHE_BYTES = 512 << 20
"""Of KV cache, enough for every load without a preemption."""
FLAGS = (
    *("--max-num-seqs=64", "--max-num-batched-tokens=2048"),
    f"--kv-cache-memory-bytes={CACHE_BYTES}",
)
"""Those that both sides are started with, on top of what the adapter sets by itself."""
ENVIRON: Mapping[str, str] = {
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

OURS = worker(ENGINE, FLAGS)


def _words(model: Path, dtype: str, port: int) -> Sequence[str]:
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out"),
        *("--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning"),
        *("--model", str(model), "--tokenizer", str(model), "--skip-tokenizer-init"),
        *("--dtype", dtype, "--max-model-len", str(MAX_LENGTH)),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--max-logprobs", "256"),
        *("--enforce-eager", "--no-enable-chunked-prefill", *FLAGS),
    ]


def _body(prompt: list[int], length: int) -> Mapping[str, Any]:
    sampling = {"max_tokens": length, "ignore_eos": True, "temperature": 1, "logprobs": 0}
    return {"token_ids": prompt, "sampling_params": sampling}


def _count(answer: Any) -> int:
    return len(answer["choices"][0]["logprobs"]["content"])


THEIRS = Side("theirs", _words, "/health", "/inference/v1/generate", _body, _count)
