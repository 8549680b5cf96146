"""SGLang's parsers of answers, called as its own server calls them for an answer that is not streamed.

They run in the worker's process, not in SGLang's, which sees token ids only.
"""

from __future__ import annotations

import os
from typing import Any

from rollout_worker.engines.answer_parsers import (
    AnswerOrigin,
    EngineParsers,
    ParsedAnswer,
    ParseText,
    ToolCall,
    silence_loggers,
)

HARMONY_START = "<|start|>assistant"
"""What a prompt of gpt-oss ends with, and its parser looks for."""
CACHE_VARIABLES = (
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "TILELANG_CACHE_DIR"),
    "FLASHINFER_WORKSPACE_BASE",
)
"""The import of SGLang moves the caches of libraries, and so those of a trainer in whose process it happens."""


def sglang_parsers() -> EngineParsers:
    """Return the parsers that the installed SGLang has."""
    moved = [name for name in CACHE_VARIABLES if name not in os.environ]
    from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES
    from sglang.srt.parser.reasoning_parser_names import REASONING_PARSER_NAMES

    for name in moved:
        os.environ.pop(name, None)
    return EngineParsers(TOOL_CALL_PARSER_NAMES, REASONING_PARSER_NAMES, make_parser)


def make_parser(tool: str | None, reasoning: str | None, tokenizer: Any) -> ParseText:
    """Return SGLang's parser of these names."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    silence_loggers("sglang.srt.function_call", "sglang.srt.parser")

    def think(text: str, origin: AnswerOrigin, request: Any) -> tuple[str, str]:
        options = {"tokenizer": tokenizer, "tool_call_parser_active": tool is not None}
        known: Any = ReasoningParser(reasoning, False, None, request, **options)
        tail = origin.prompt_end(tokenizer)
        opens, closes = known.detector.think_start_token, known.detector.think_end_token
        if closes and tail.endswith(closes):
            return "", text
        if opens and tail.endswith(opens):
            known = ReasoningParser(reasoning, False, True, request, **options)
        thought, content = known.parse_non_stream(text)
        return thought or "", content or ""

    def parse(text: str, origin: AnswerOrigin) -> ParsedAnswer:
        request = ChatCompletionRequest.model_validate(origin.as_request())
        if tool == "gpt-oss" and text.startswith("<|channel|>"):
            text = HARMONY_START + text
        thought = ""
        if reasoning is not None:
            thought, text = think(text, origin, request)
        if tool is None or not request.tools:
            return ParsedAnswer(text, thought)
        parser: Any = FunctionCallParser(request.tools, tool, tokenizer=tokenizer)
        content, calls = parser.parse_non_stream(text)
        return ParsedAnswer(
            content or "", thought, tuple(ToolCall(call.name, call.parameters) for call in calls)
        )

    if tool is not None:
        FunctionCallParser([], tool, tokenizer=tokenizer)
    if reasoning is not None:
        ReasoningParser(reasoning, tokenizer=tokenizer)
    return parse
