"""Reads texts with an engine's parsers, in that engine's environment: JSON in, JSON out, whole and cut into pieces.

    python answer_reading_job.py ENGINE TOKENIZER_FOLDER < cases.json

A case: `tool` and `reasoning` name parsers, `texts`, `tools`, `prompt` (text). Its result: for each text a list of `[content,
reasoning, [[name, arguments], …]]`, whole and in pieces of `PIECES` characters, and `seconds` of the processor; or `error`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rollout_worker.engine import EngineError
from rollout_worker.engines import find_parsers
from rollout_worker.engines.answer_parsers import AnswerOrigin, ParserNames
from rollout_worker.engines.model_folder import load_tokenizer
from rollout_worker.openai.answer_reading import AnswerReader, TextGate, choose_parsers
from rollout_worker.openai.model_text import special_tokens

PIECES = (1, 5, 40)


def read(reader: AnswerReader, text: str, origin: AnswerOrigin, size: int) -> list[Any]:
    """Read a text that comes in pieces, as a streamed answer is read; size 0: at once, as an answer is."""
    gate = TextGate(reader.first_marks(tools=bool(origin.tools), thinks=True))
    steps = [text[at : at + size] for at in range(0, len(text), size)] if size else []
    seen = "".join(gate.push_text(step) for step in steps)
    found = reader.read_text(gate.held if size else text, origin, thinks=True)
    calls = [[call.name, call.arguments] for call in found.calls]
    return [reader.clean_text(seen + found.content), found.reasoning, calls]


def token_ids(tool: str, text: str) -> list[int]:
    """Return the ids that vLLM's parser of gpt-oss reads instead of the text."""
    if tool != "openai":
        return []
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    ids: list[int] = get_encoding().encode(text, allowed_special="all")
    return ids


def main() -> None:
    engine, folder = sys.argv[1:]
    before = dict(os.environ)
    parsers, tokenizer = find_parsers(engine), load_tokenizer(Path(folder))
    assert tokenizer is not None
    assert engine == "vllm" or dict(os.environ) == before
    results: list[Any] = []
    for case in json.load(sys.stdin):
        names = ParserNames(engine, case.get("tool"), case.get("reasoning"))
        try:
            parsers.check_names(names)
            tool, reasoning = choose_parsers(names, "")
            reader = AnswerReader(
                tool,
                reasoning,
                lambda tool, reasoning: parsers.make_parser(tool, reasoning, tokenizer),
                special_tokens(tokenizer),
            )
        except EngineError as error:
            results.append({"error": str(error)})
            continue
        prompt = tokenizer(case.get("prompt", ""))["input_ids"]
        found = []
        began = time.process_time()
        for text in case["texts"]:
            origin = AnswerOrigin(case["tools"], prompt, token_ids(tool or "", text))
            found.append([read(reader, text, origin, size) for size in (0, *PIECES)])
        results.append({"found": found, "seconds": time.process_time() - began})
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main()
