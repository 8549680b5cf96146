"""Text at the edges of the OpenAI routes: chat templates, prompts to ids; `streamed_text` has the way back.

Between the edges everything is token ids, so a trainer learns from exactly what was sampled. The first
request that needs the tokenizer loads it with transformers, in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import EngineError
from rollout_worker.engines import find_parsers
from rollout_worker.engines.answer_parsers import HERMES_ONLY, ParserNames, ParseText
from rollout_worker.engines.model_folder import decode_tokens, load_tokenizer
from rollout_worker.threads import SharedCall

from .answer_reading import AnswerReader, choose_parsers
from .settings import TEMPLATE_READ_SECONDS, TOKENIZER_SECONDS

T = TypeVar("T")

_REJECTIONS = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""What templates raise besides their own errors."""


def read_chat_template(folder: Path) -> str:
    """Return the chat template of a model's folder, empty if there is none; transformers isn't needed."""
    try:
        return (folder / "chat_template.jinja").read_text()
    except OSError:
        pass
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return ""
    template = config.get("chat_template") or ""
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template", "") for each in template}
        template = named.get("tool_use") or named.get("default") or ""
    return str(template)


NO_PARSERS = ParserNames("hf")


class ModelText:
    """The served model's tokenizer and chat template.

    `folder` returns that of the loaded model, or raises ProblemError while there is none. `parsers`: of answers, as the
    worker's flags name them.
    """

    def __init__(
        self,
        folder: Callable[[], Path],
        seconds: float = TEMPLATE_READ_SECONDS,
        parsers: ParserNames = NO_PARSERS,
    ) -> None:
        self._folder = folder
        self._seconds = seconds
        self._parsers = parsers
        self._reader: AnswerReader | None = None
        self._tokenizer: Any = None
        self._longest_token = 0
        self._template: str | None = None
        self._reading = SharedCall(lambda: read_chat_template(folder()), "template")
        # One at a time: tokenizers are not thread-safe.
        self._thread = ThreadPoolExecutor(1, "texts")

    async def chat_template(self) -> str:
        """The chat template, empty if the model has none.

        Raises:
            ProblemError: The model's folder does not answer, or no model is loaded yet.
        """
        if self._template is None:
            try:
                self._template = await self._reading.get_result(self._seconds)
            except TimeoutError:
                raise _late_problem(
                    f"the model's folder did not answer in {self._seconds:g} s"
                ) from None
        return self._template

    async def encode_prompt(self, text: str, *, special: bool, max_length: int) -> list[int]:
        """Return the token ids of a plain prompt; `special`: with the special tokens that the tokenizer adds.

        Raises:
            ProblemError: 422 if the string is not valid text; 413 if it can't be one of `max_length` tokens.
        """
        return await self._run_in_thread(
            lambda tokenizer: self._encode_text(tokenizer, "prompt", text, special, max_length)
        )

    def _encode_text(
        self, tokenizer: Any, field: str, text: str, special: bool, max_length: int
    ) -> list[int]:
        _check_text(field, text)
        if not self._longest_token:
            self._longest_token = max(map(len, tokenizer.get_vocab()))
        # Ids of megabytes take the tokenizer half a minute, in which nobody else gets it.
        if len(text) > max_length * self._longest_token:
            said = f"{len(text)} characters are never {max_length} tokens, the maximum length"
            problem = [{"field": field, "message": said}]
            raise ProblemError("too-long", f"{field}: {said}: shorten them", errors=problem)
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])

    async def render_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        special: bool,
        max_length: int,
        **options: bool,
    ) -> list[int]:
        """Return the token ids of a conversation; `variables` are passed to the template.

        `special`: the tokenizer adds its special tokens to what the template wrote.

        Raises:
            ProblemError: 422 if the model has no template, or the template rejects these messages,
                tools or variables; 413 if they can't be `max_length` tokens.
        """
        _check_template(await self.chat_template(), tools)

        def render(tokenizer: Any) -> list[int]:
            from jinja2 import TemplateError

            _check_variables(variables, tokenizer.apply_chat_template)
            said = plain_messages(messages)
            try:
                text = tokenizer.apply_chat_template(
                    said,
                    tools=list(tools) if tools else None,
                    tokenize=False,
                    **options,
                    **variables,
                )
            except (TemplateError, *_REJECTIONS) as error:
                raise _unsupported_problem(
                    "messages", f"the model's chat template rejects them: {error}"
                ) from error
            return self._encode_text(tokenizer, "messages", text, special, max_length)

        return await self._run_in_thread(render)

    async def special_tokens(self) -> list[str]:
        """Return the tokenizer's special tokens, which no text becomes."""
        return await self._run_in_thread(special_tokens)

    async def tool_parser(self) -> str | None:
        """Return the name of the parser of calls; None: they stay text."""
        return choose_parsers(self._parsers, await self.chat_template())[0]

    async def answer_reader(self) -> AnswerReader | None:
        """Return what reads the answers of chats; None if they are text only.

        Raises:
            ProblemError: 422 if the model has no tokenizer, or not one for the parsers.
        """
        given = self._parsers
        tool, reasoning = choose_parsers(given, await self.chat_template())
        if self._reader is None and (tool, reasoning) != (None, None):
            self._reader = await self._run_in_thread(
                lambda tokenizer: _make_reader(given, tool, reasoning, tokenizer)
            )
        return self._reader

    async def make_decoder(self) -> Callable[[Sequence[int], bool], str]:
        """Return a function (ids, keep special tokens) -> text, fast enough for the event loop."""
        tokenizer = await self._run_in_thread(lambda tokenizer: tokenizer)

        return lambda ids, special: decode_tokens(tokenizer, ids, special=special)

    async def _run_in_thread(self, work: Callable[[Any], T]) -> T:
        def run() -> T:
            if self._tokenizer is None:
                self._tokenizer = _load_tokenizer(self._folder())
            return work(self._tokenizer)

        call = asyncio.get_running_loop().run_in_executor(self._thread, run)
        try:
            async with asyncio.timeout(TOKENIZER_SECONDS):
                return await call
        except TimeoutError:
            raise _late_problem(
                f"the tokenizer was busy with other requests for {TOKENIZER_SECONDS:g} s"
            ) from None


def special_tokens(tokenizer: Any) -> list[str]:
    """Return the tokens that decoding leaves out: also those that have no role in the tokenizer."""
    added = tokenizer.added_tokens_decoder.values()
    return [*tokenizer.all_special_tokens, *(token.content for token in added if token.special)]


def _make_reader(
    given: ParserNames, tool: str | None, reasoning: str | None, tokenizer: Any
) -> AnswerReader:
    own = (
        HERMES_ONLY if (given.tool, given.reasoning) == (None, None) else find_parsers(given.engine)
    )

    def make(tool: str | None, reasoning: str | None) -> ParseText:
        # What the template alone shows is parsed as on every engine.
        parsers = HERMES_ONLY if reasoning is None and given.tool is None else own
        return parsers.make_parser(tool, reasoning, tokenizer)

    try:
        return AnswerReader(tool, reasoning, make, special_tokens(tokenizer))
    except EngineError as error:
        raise _unsupported_problem("messages", str(error)) from error


def _load_tokenizer(folder: Path) -> Any:
    missing = _unsupported_problem(
        "prompt", "the model's folder has no tokenizer: send token ids to /v1/generate"
    )
    try:
        tokenizer = load_tokenizer(folder)
    except EngineError as error:
        raise missing from error
    if tokenizer is None:
        raise missing
    return tokenizer


def _check_template(template: str, tools: Sequence[Mapping[str, Any]] | None) -> None:
    if not template:
        raise _unsupported_problem(
            "messages", "the model has no chat template: use /v1/completions"
        )
    if tools and "tools" not in template:
        raise _unsupported_problem(
            "tools", "the model's chat template supports no tools: leave them out"
        )


def _check_variables(variables: Mapping[str, Any], apply: Callable[..., Any]) -> None:
    """Refuse names that are parameters of the rendering call, and not variables of a template."""
    taken = inspect.signature(apply).parameters.keys() - {"documents"} | {"messages"}
    for name in taken.intersection(variables):
        field = f"chat_template_kwargs.{name}"
        raise _unsupported_problem(field, f"{field}: not a template variable: leave it out")


def _check_text(field: str, text: str) -> None:
    """Refuse half of a surrogate pair, which JSON can escape but no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair, {text[error.start]!a}: send whole characters"
        raise _bad_field(field, half) from error


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them: plain text, arguments of earlier tool calls as objects.

    Raises:
        ProblemError: 422 that names the message: it has no role, or a part that is not text.
    """
    return [_plain_message(f"messages.{number}", each) for number, each in enumerate(messages)]


def _plain_message(field: str, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise _bad_field(f"{field}.role", "every message needs a role")
    kept = {key: value for key, value in message.items() if value is not None}
    kept["content"] = _join_text(f"{field}.content", message.get("content"))
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought is not None:
        # Templates know it under either name, as the engines' servers do.
        text = _join_text(f"{field}.reasoning_content", thought)
        kept |= {"reasoning_content": text, "reasoning": text}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise _bad_field(f"{field}.tool_calls", "must be a list")
        kept["tool_calls"] = [_plain_tool_call(f"{field}.tool_calls", call) for call in calls]
    return kept


def _join_text(field: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad_field(field, "must be a string or a list of parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise _bad_field(field, f"parts of type {kind!r} are not supported: send text")
    return "".join(str(part.get("text", "")) for part in content)


def _plain_tool_call(field: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad_field(field, "every tool call needs a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:  # empty: a call without any
        # Templates print arguments as JSON; a string would be quoted twice.
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise _bad_field(
                field, f"arguments of {function['name']!r} are not valid JSON"
            ) from None
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _bad_field(field: str, detail: str) -> ProblemError:
    said = f"{field}: {detail}"
    return ProblemError("invalid-request", said, errors=[{"field": field, "message": detail}])


def _late_problem(detail: str) -> ProblemError:
    return ProblemError("deadline-exceeded", f"{detail}: try again", retry_after=1)


def _unsupported_problem(field: str, detail: str) -> ProblemError:
    return ProblemError("unsupported", detail, errors=[{"field": field, "message": detail}])
