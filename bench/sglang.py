"""Our worker over SGLang against SGLang's own server; see `servers`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .results import Options, Result
from .servers import CACHE_TOKENS, MAX_LENGTH, Side, compare, notes, worker

SUMMARY = "our worker over SGLang against SGLang's own server (P9)"
ENGINE = "sglang"
FLAGS = ("--max-running-requests=64",)

OURS = worker(ENGINE, FLAGS)


def _words(model: Path, dtype: str, port: int) -> Sequence[str]:
    return [
        *("-m", "sglang.launch_server", "--model-path", str(model), "--dtype", dtype),
        *("--device", "cpu", "--attention-backend", "torch_native", "--host", "127.0.0.1"),
        *("--port", str(port), "--context-length", str(MAX_LENGTH), "--log-level", "warning"),
        *("--max-total-tokens", str(CACHE_TOKENS), "--skip-tokenizer-init"),
        *("--disable-overlap-schedule", "--sleep-on-idle", "--enable-metrics", *FLAGS),
    ]


def _body(prompt: list[int], length: int) -> Mapping[str, Any]:
    sampling = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}


def _count(answer: Any) -> int:
    return len(answer["meta_info"]["output_token_logprobs"])


THEIRS = Side("theirs", _words, "/ready", "/generate", _body, _count)


def run(options: Options) -> Result:
    """Run both servers through the same loads."""
    figures = compare(sys.modules[__name__], options)
    title = "Our worker over SGLang against SGLang's own server"
    return Result("sglang", title, figures, notes=notes(options))
