"""vLLM's parsers of answers, called as its own server calls them for an answer that is not streamed."""

from __future__ import annotations

from typing import Any

from rollout_worker.engines.answer_parsers import (
    AnswerOrigin,
    EngineParsers,
    ParsedAnswer,
    ParseText,
    ToolCall,
    silence_loggers,
)

HARMONY_PARSERS = {"openai", "openai_gptoss"}
"""They parse gpt-oss' token ids together; vLLM itself chooses that by the model's type."""


def vllm_parsers() -> EngineParsers:
    """Return the parsers that the installed vLLM has."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    return EngineParsers(
        ToolParserManager.list_registered(), ReasoningParserManager.list_registered(), make_parser
    )


def make_parser(tool: str | None, reasoning: str | None, tokenizer: Any) -> ParseText:
    """Return vLLM's parser of these names; raises what vLLM raises for a tokenizer that lacks its marks."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager
    from vllm.tokenizers.hf import get_cached_tokenizer

    silence_loggers("vllm.tool_parsers", "vllm.reasoning", "vllm.parser")
    harmony = bool(HARMONY_PARSERS & {tool, reasoning})
    # Parsers ask for the whole vocabulary, for each answer.
    cached = get_cached_tokenizer(tokenizer)
    kind: Any = ParserManager.get_parser(
        tool_parser_name=tool,
        reasoning_parser_name=reasoning,
        enable_auto_tools=True,
        model_name=tokenizer.name_or_path,
        is_harmony=harmony,
        tokenizer=cached,
    )
    if harmony:
        from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

        get_encoding()  # a file, which the first answer would miss if it can't be fetched

    def parse(text: str, origin: AnswerOrigin) -> ParsedAnswer:
        request = ChatCompletionRequest.model_validate(origin.as_request())
        variables = request.chat_template_kwargs
        parser = kind(cached, request.tools, chat_template_kwargs=variables)
        engine = getattr(parser.tool_parser, "_parser_engine", None)
        if engine is not None:
            # Else it makes JSON of all arguments so far at each piece, though nobody reads it: 4 s for 7 KB of HTML.
            engine._stream_arg_deltas = False
        closes = getattr(parser.reasoning_parser, "reasoning_end_str", None)
        if tool is None and closes and origin.prompt_end(cached).endswith(closes):
            return ParsedAnswer(text)
        parser.set_prompt_token_ids(list(origin.prompt_ids))
        thought, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=list(origin.token_ids)
        )
        found = tuple(ToolCall(call.name, call.arguments or "{}") for call in calls or ())
        return ParsedAnswer(content or "", thought or "", found)

    return parse
