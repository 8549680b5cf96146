"""Our worker over vLLM against vLLM's own server; see `servers`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .results import Options, Result
from .servers import MAX_LENGTH, Side, compare, notes, worker

SUMMARY = "our worker over vLLM against vLLM's own server (P9)"
ENGINE = "vllm"
FLAGS = ("--max-num-seqs=64", "--max-num-batched-tokens=2048")
CACHE_BYTES = 512 << 20
"""Of KV cache for the server: as many tokens as the worker gets, with the 0.5B shape in float32."""

OURS = worker(ENGINE, FLAGS)


def _words(model: Path, dtype: str, port: int) -> Sequence[str]:
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", dtype),
        *("--max-model-len", str(MAX_LENGTH), "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--enable-scale-out", "--no-enable-chunked-prefill"),
        *("--logprobs-mode", "processed_logprobs", "--uvicorn-log-level", "warning"),
        *("--kv-cache-memory-bytes", str(CACHE_BYTES), *FLAGS),
    ]


def _body(prompt: list[int], length: int) -> Mapping[str, Any]:
    sampling = {"max_tokens": length, "ignore_eos": True, "temperature": 1, "logprobs": 0}
    return {"token_ids": prompt, "sampling_params": sampling}


def _count(answer: Any) -> int:
    return len(answer["choices"][0]["logprobs"]["content"])


THEIRS = Side("theirs", _words, "/health", "/inference/v1/generate", _body, _count)


def run(options: Options) -> Result:
    """Run both servers through the same loads."""
    figures = compare(sys.modules[__name__], options)
    title = "Our worker over vLLM against vLLM's own server"
    return Result("vllm", title, figures, notes=notes(options))
