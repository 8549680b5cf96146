"""The process that checks grammars of requests, so that a bad one can be killed.

Some grammars take minutes or gigabytes to compile, whatever limits the library has. Each check has a limit of CPU time
here, and the process one of memory; the worker that waits for the answer goes on serving.

One JSON object a line. It reads `{"tokenizer": tokenizer.json's text, "eos": [ids]}` once and answers `{"ready": true}`;
then it reads `{"kind", "text"}` and answers `{"grammar": serialised}` or `{"error": text}`, in order.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from typing import IO, Any

from llguidance import LLMatcher, LLTokenizer, grammar_from

from rollout_common.parent_death import die_with_parent
from rollout_worker.engines.settings import GRAMMAR_CPU_SECONDS

MEMORY_BYTES = 4 << 30
"""Address space: a vocabulary of 256,000 tokens takes 0.5 GB, a grammar within the time limit below 1 GB."""

TRIED_TOKENS = 3
STACK_BYTES = 1 << 20
"""A quarter of what engines' threads have: rules that are nested so deep that they overflow it are refused."""


def serialize_grammar(kind: str, text: str) -> str:
    """Return the library's own form of a grammar; raises `ValueError` if it can't be read."""
    if kind == "json_schema":
        # As vLLM and SGLang compile it.
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": True})
    return grammar_from(kind, text)  # type: ignore[arg-type]


def check_grammar(tokens: LLTokenizer, kind: str, text: str) -> dict[str, str]:
    """Return the answer for one grammar: its serialised form, or what is wrong with it."""
    try:
        grammar = serialize_grammar(kind, text)
    except ValueError as error:
        return {"error": str(error)}
    # Compiled as the engine will, and followed for a few tokens: some grammars only fail there.
    matcher = LLMatcher(tokens, grammar, log_level=0)
    for _ in range(TRIED_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask:
            break
        matcher.consume_token(mask.bit_length() - 1)
    return {"error": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}


def serve_checks(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer until the worker closes its end."""

    def send_answer(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    setup = json.loads(requests.readline())
    tokens = LLTokenizer(setup["tokenizer"], eos_token=setup["eos"])
    send_answer({"ready": True})
    while line := requests.readline():
        request = json.loads(line)
        # At its end the kernel kills this process: nothing could interrupt the library.
        signal.setitimer(signal.ITIMER_PROF, GRAMMAR_CPU_SECONDS)
        answer = check_grammar(tokens, request["kind"], request["text"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        send_answer(answer)


if __name__ == "__main__":
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    server = threading.Thread(target=serve_checks, args=(sys.stdin.buffer, sys.stdout.buffer))
    server.start()
    server.join()
