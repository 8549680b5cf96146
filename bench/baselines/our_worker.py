"""Our worker's side of a comparison with its engine's own server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.rigs.servers import Side

MAX_LENGTH = 1024


def worker(engine: str, flags: Sequence[str], cache_tokens: int | None = None) -> Side:
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

    return Side("ours", words, "/ready", "/v1/generate", _body, _count)


def _body(prompt: list[int], length: int) -> Mapping[str, Any]:
    return {"token_ids": prompt, "sampling": {"max_tokens": length, "ignore_eos": True}}


def _count(answer: Any) -> int:
    return len(answer["outputs"][0]["logprobs"])
