"""Reads texts with an engine's parsers, in that engine's environment: JSON in, JSON out, whole and cut into pieces.

    python answer_reading_job.py ENGINE TOKENIZER_FOLDER < asked.json

It is asked with `tools`, which each case that names a parser of them offers, and `cases` by name: `tool` and `reasoning`
name parsers, `texts`, `prompt` (text), `sizes` of the pieces in which a text comes, 0 for all at once (by default `SIZES`).
The result of a case: for each text and size a list of `[content, reasoning, [[name, arguments], …]]`, and `seconds` of the
processor; or `error`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rollout_worker.engine import EngineError
from rollout_worker.engines import find_parsers
from rollout_worker.engines.answer_parsers import AnswerOrigin, EngineParsers, ParserNames
from rollout_worker.engines.model_folder import load_tokenizer
from rollout_worker.openai.answer_reading import AnswerReader, TextGate, choose_parsers
from rollout_worker.openai.model_text import special_tokens

SIZES = (0, 1, 5, 40)


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


def read_case(
    engine: str, parsers: EngineParsers, tokenizer: Any, case: dict[str, Any], tools: list[Any]
) -> dict[str, Any]:
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
        return {"error": str(error)}
    prompt = tokenizer(case.get("prompt", ""))["input_ids"]
    found = []
    began = time.process_time()
    for text in case["texts"]:
        origin = AnswerOrigin(tools if "tool" in case else [], prompt, token_ids(tool or "", text))
        found.append([read(reader, text, origin, size) for size in case.get("sizes", SIZES)])
    return {"found": found, "seconds": time.process_time() - began}


def main() -> None:
    engine, folder = sys.argv[1:]
    parsers, tokenizer = find_parsers(engine), load_tokenizer(Path(folder))
    assert tokenizer is not None
    asked = json.load(sys.stdin)
    results = {
        name: read_case(engine, parsers, tokenizer, case, asked["tools"])
        for name, case in asked["cases"].items()
    }
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main()
