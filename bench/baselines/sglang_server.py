"""SGLang's own server, with the very flags that our worker gives to its child."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from bench.rigs.servers import Side
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.sglang.model import read_model
from rollout_worker.engines.sglang.settings import child_environment, child_flags, parse_flags

from .our_worker import MAX_LENGTH, worker

ENGINE = "sglang"
FLAGS = ("--max-running-requests=64", "--log-level=warning")
"""Those that both sides are started with, on top of what the adapter sets by itself."""
CACHE_TOKENS = 20480
"""Of KV cache, enough for every load without a preemption."""
ONLY_OURS = "--custom-weight-loader"
"""The adapter's own code, for updates of weights, of which the loads have none."""
ENVIRON: Mapping[str, str] = child_environment(EngineOptions(model=Path()), cpu=True)

OURS = worker(ENGINE, FLAGS, CACHE_TOKENS)


def _words(model: Path, dtype: str, port: int) -> Sequence[str]:
    options = EngineOptions(
        model=model,
        dtype=cast(Literal["float32", "bfloat16"], dtype),
        max_length=MAX_LENGTH,
        device="cpu",
        max_batch_tokens=CACHE_TOKENS,
        args=FLAGS,
    )
    flags = child_flags(options, parse_flags(FLAGS), read_model(options), cpu=True)
    loader = flags.index(ONLY_OURS)
    return [
        *("-m", "sglang.launch_server", *flags[:loader], *flags[loader + 2 :]),
        # The child adds it by itself where memory can be given back: in the environment of the
        # tests and on GPUs.
        *("--enable-memory-saver", "--host", "127.0.0.1", "--port", str(port)),
    ]


def _body(prompt: list[int], length: int) -> Mapping[str, Any]:
    sampling = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}


def _count(answer: Any) -> int:
    return len(answer["meta_info"]["output_token_logprobs"])


THEIRS = Side("theirs", _words, "/ready", "/generate", _body, _count)
