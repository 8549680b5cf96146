"""Check the grammars of requests before they are admitted, in a process that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import logging
import math
import os
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from rollout_common.wire import StructuredOutput
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import EngineError, Grammar, InvalidRequest
from rollout_worker.engines.model_folder import load_tokenizer
from rollout_worker.engines.settings import (
    GRAMMAR_CHECK_SECONDS,
    GRAMMAR_START_SECONDS,
    LATE_VERDICT_SECONDS,
    MAX_CHECKED_GRAMMARS,
    MAX_WAITING_GRAMMARS,
)

logger = logging.getLogger(__name__)

PROCESS_MODULE = "rollout_worker.engines.grammars.grammar_process"
MAX_LINE_BYTES = 16 << 20
"""Of an answer: a grammar of the largest request, escaped twice, has below 2 MB."""
MAX_ERROR_LENGTH = 500
"""Characters of the library's message; the rest repeats the grammar."""

Verdict = tuple[dict[str, str], float]
"""`{"grammar": serialised}` or `{"error": text}`, and until when it holds, by the monotonic clock."""


def supports_grammars(tokenizer: Any | None, eos: Collection[int]) -> bool:
    """Whether grammars can be compiled for a model: by its tokenizer's file, and there is a token for the end."""
    fast = tokenizer is not None and getattr(tokenizer, "is_fast", False)
    return bool(fast and eos) and importlib.util.find_spec("llguidance") is not None


def tokenizer_text(tokenizer: Any) -> str:
    """Return a fast tokenizer as the text of its file, without padding and truncation."""
    from copy import copy

    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


class GrammarChecker:
    """Checks grammars for the tokens of one model, one after the other; remembers its verdicts.

    Args:
        folder: Returns the folder of the loaded model.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._checking: asyncio.Task[Verdict] | None = None
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._waiting: Counter[bytes] = Counter()
        """How many callers wait for the verdict about each grammar."""

    async def check_structured(self, structured: StructuredOutput, eos: Collection[int]) -> Grammar:
        """Return the grammar of a structured output; `eos`: the ids that end one.

        Raises:
            InvalidRequest: It can't be compiled, or takes too long; names the field and the reason.
            ProblemError: 429: too many others wait.
        """
        kind, text = grammar_text(structured)
        key = hashlib.sha256(f"{kind}:{text}".encode()).digest()
        verdict = self._valid_verdict(key)
        if verdict is None:
            with self._waiting_turn(key):
                await self._lock.acquire()
                self._checking = asyncio.create_task(self._check_new(key, kind, text, eos))
                # Not a `finally` in the task: one that is cancelled before its first step never gets there.
                self._checking.add_done_callback(lambda _: self._lock.release())
                # A check that has begun goes on without its caller: to end it would cost a new process.
                verdict = await asyncio.shield(self._checking)
        else:
            self._verdicts.move_to_end(key)
        answer, _ = verdict
        if "error" in answer:
            raise InvalidRequest(f"structured.{kind}", answer["error"])
        return Grammar(structured, answer["grammar"])

    async def _check_new(self, key: bytes, kind: str, text: str, eos: Collection[int]) -> Verdict:
        """Return the verdict about a grammar and remember it."""
        verdict = self._valid_verdict(key) or await self._ask_process(kind, text, eos)
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_CHECKED_GRAMMARS:
            self._verdicts.popitem(last=False)
        return verdict

    @contextlib.contextmanager
    def _waiting_turn(self, key: bytes) -> Iterator[None]:
        if key not in self._waiting and len(self._waiting) >= MAX_WAITING_GRAMMARS:
            detail = "too many new grammars wait for their check: try again, or use another replica"
            raise ProblemError("queue-full", detail, retry_after=1)
        self._waiting[key] += 1
        try:
            yield
        finally:
            self._waiting -= Counter([key])  # drops a count of 0

    def _valid_verdict(self, key: bytes) -> Verdict | None:
        found = self._verdicts.get(key)
        return found if found is not None and time.monotonic() < found[1] else None

    async def _ask_process(self, kind: str, text: str, eos: Collection[int]) -> Verdict:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start_process(eos)
        try:
            async with asyncio.timeout(GRAMMAR_CHECK_SECONDS):
                answer = await _exchange_lines(process, {"kind": kind, "text": text})
        except (TimeoutError, ConnectionError, ValueError):
            await self._end_process()
            logger.warning("a grammar took too much time or memory to check: %.200s", text)
            error = (
                "takes too much time or memory to compile: make it simpler, above all large"
                " counts such as minItems, maxLength or {1000}, and long lists of alternatives"
            )
            return {"error": error}, time.monotonic() + LATE_VERDICT_SECONDS
        if "error" in answer:
            answer = {"error": f"can't be compiled: {answer['error'][:MAX_ERROR_LENGTH]}"}
        return answer, math.inf

    async def _start_process(self, eos: Collection[int]) -> asyncio.subprocess.Process:
        tokenizer = await asyncio.to_thread(load_tokenizer, self._folder())
        if not supports_grammars(tokenizer, eos):
            raise EngineError("the model has no tokenizer that grammars can be compiled for")
        text = await asyncio.to_thread(tokenizer_text, tokenizer)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", PROCESS_MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            env={**os.environ, "RAYON_NUM_THREADS": "1"},
        )
        try:
            async with asyncio.timeout(GRAMMAR_START_SECONDS):
                await _exchange_lines(process, {"tokenizer": text, "eos": sorted(eos)})
        except BaseException as error:
            await _kill_process(process)
            if isinstance(error, TimeoutError | ConnectionError | ValueError):
                raise EngineError(
                    "the process that checks grammars did not start: its messages are in the log"
                ) from error
            raise
        return process

    async def stop(self) -> None:
        """End the process and what it checks; the next check starts another one."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.wait({self._checking})
        await self._end_process()

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await _kill_process(process)


def grammar_text(structured: StructuredOutput) -> tuple[str, str]:
    """Return which of its fields is set, and that as text."""
    if structured.json_schema is not None:
        schema = json.dumps(structured.json_schema, ensure_ascii=False, separators=(",", ":"))
        return "json_schema", schema
    if structured.choice is not None:
        return "choice", json.dumps(structured.choice, ensure_ascii=False)
    if structured.regex is not None:
        return "regex", structured.regex
    assert structured.grammar is not None, "exactly one field is set"
    return "grammar", structured.grammar


async def _exchange_lines(process: asyncio.subprocess.Process, message: Any) -> dict[str, Any]:
    """Send a line and return the answer; raises `ConnectionError` or `ValueError` if the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    await process.stdin.drain()
    answer: dict[str, Any] = json.loads(await process.stdout.readline())
    return answer


async def _kill_process(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
