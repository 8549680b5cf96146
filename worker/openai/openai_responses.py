"""Finished and streaming outputs in OpenAI's format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_common.wire import StopReason, StreamDelta, WeightsSpan
from rollout_worker.engines.answer_parsers import AnswerOrigin
from rollout_worker.requests.in_flight_requests import InFlightRequest
from rollout_worker.requests.running_output import RunningOutput

from .answer_reading import AnswerReader, TextGate
from .openai_models import ChatRequest, CompletionRequest
from .streamed_text import StreamedText

Decode = Callable[[Sequence[int], bool], str]
Choice = dict[str, Any]

FINISH_REASONS = {StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.ABORTED: "abort"}
"""`abort` is not an OpenAI value, but none of theirs says that the answer is incomplete."""


@dataclass(frozen=True, slots=True)
class ChatReading:
    """How the answers of one chat are read; `thinks`: they may begin with reasoning, for which a grammar leaves no room."""

    reader: AnswerReader
    request: ChatRequest
    thinks: bool = True

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools that may be called."""
        return self.request.offered_tools if self.request.may_call_tools else []

    @property
    def first_marks(self) -> tuple[str, ...]:
        """What may begin something else than content."""
        return self.reader.first_marks(tools=bool(self.tools), thinks=self.thinks)

    def content_of(self, text: str) -> str:
        """Return a text that is content, with special tokens only if they were asked for."""
        return self.reader.clean_text(text) if self.request.skip_special_tokens else text

    def read_message(self, text: str, output: RunningOutput) -> dict[str, Any]:
        """Return the fields of OpenAI's message for a text, or for the rest of one."""
        origin = AnswerOrigin(
            self.tools,
            output.request.token_ids,
            output.token_ids,
            self.request.chat_template_kwargs,
        )
        found = self.reader.read_text(text, origin, thinks=self.thinks)
        # Of more calls than the caller takes, the first ones.
        most = 1 if self.request.parallel_tool_calls is False else None
        message: dict[str, Any] = {"content": self.content_of(found.content)}
        if found.reasoning:
            # SGLang's server has the one name, vLLM's the other.
            thought = self.content_of(found.reasoning)
            message |= {"reasoning_content": thought, "reasoning": thought}
        if found.calls:
            earlier = sum(len(each.get("tool_calls") or ()) for each in self.request.messages)
            message["tool_calls"] = [
                {
                    "id": self.reader.call_id(call.name, number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(found.calls[:most], earlier)
            ]
        return message


@dataclass(slots=True)
class OpenAIExchange:
    """One call to an OpenAI route: the request, and the flights that answer it."""

    id: str
    model: str
    request: ChatRequest | CompletionRequest
    flights: list[InFlightRequest]
    decode: Decode
    reading: ChatReading | None = None
    """How answers are read; None: they are text only."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Whether this is the chat route."""
        return isinstance(self.request, ChatRequest)

    def make_text(self) -> StreamedText:
        """For the text of one output; parsers want its special tokens."""
        special = self.reading is not None or not self.request.skip_special_tokens
        return StreamedText(
            self.decode,
            self.request.stop_strings,
            special=special,
            min_tokens=self.request.min_tokens or 0,
        )

    @property
    def outputs(self) -> list[RunningOutput]:
        """All outputs, prompt by prompt, as their choices are numbered."""
        return [output for flight in self.flights for output in flight.outputs]

    def oldest_weights(self) -> WeightsSpan | None:
        """The span of the oldest weights that have produced a token so far."""
        spans = [span for output in self.outputs for span in output.spans]
        return min(spans, key=lambda span: (span.epoch, span.version), default=None)

    def common_fields(self, kind: str, choices: list[Choice], **more: Any) -> dict[str, Any]:
        """The fields common to every answer and chunk."""
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, "choices": choices, **more}

    def token_usage(self) -> dict[str, Any]:
        """Token counts over all prompts and outputs."""
        prompt = sum(len(flight.outputs[0].request.token_ids) for flight in self.flights)
        made = sum(len(output.token_ids) for output in self.outputs)
        cached = sum(flight.cached_tokens for flight in self.flights)
        return {
            **_count_tokens(prompt, made),
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def logprobs_field(
        self, ids: Sequence[int], logprobs: Sequence[float] | None, offset: int = 0
    ) -> dict[str, Any] | None:
        """Logprobs of these tokens, in the route's format; None if they were not requested."""
        if logprobs is None:
            return None
        as_ids = self.request.return_tokens_as_token_ids
        texts = [f"token_id:{i}" if as_ids else self.decode([i], True) for i in ids]
        if self.is_chat:
            content = [
                {"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []}
                for t, p in zip(texts, logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": [{t: p} for t, p in zip(texts, logprobs, strict=True)],
            "text_offset": offsets,
        }

    # A complete answer.

    def full_answer(self) -> dict[str, Any]:
        """The answer, once every output has ended."""
        choices = [self._make_choice(*each) for each in enumerate(self.outputs)]
        kind = "chat.completion" if self.is_chat else "text_completion"
        more: dict[str, Any] = {"usage": self.token_usage()}
        if self.is_chat and self.request.return_token_ids:
            more["prompt_token_ids"] = list(self.flights[0].outputs[0].request.token_ids)
        return self.common_fields(kind, choices, **more)

    def _make_choice(self, index: int, output: RunningOutput) -> Choice:
        asked = output.request.logprobs is not None
        growing = self.make_text()
        ids = self.visible_ids(output.token_ids, output)
        text = growing.push_ids(ids) + growing.take_rest()
        choice: Choice = {
            "index": index,
            "logprobs": self.logprobs_field(output.token_ids, output.logprobs if asked else None),
            "finish_reason": _finish_reason(output),
        }
        if not self.is_chat:
            choice["text"] = text
        elif self.reading is None:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            message = self.reading.read_message(text, output)
            if "tool_calls" in message:
                message["content"] = message["content"].lstrip() or None
                if output.stop_reason is StopReason.STOP:
                    choice["finish_reason"] = "tool_calls"
            choice["message"] = {"role": "assistant", **message}
        return choice | self._token_id_fields(output, output.token_ids, output.spans, first=True)

    def visible_ids(self, ids: Sequence[int], output: RunningOutput) -> Sequence[int]:
        """Return the ids without the stop id that ended the output, which is text only for some parsers."""
        if self.reading is not None and self.reading.reader.is_whole:
            return ids
        match = output.stop_match
        return ids[:-1] if match is not None and match.token_id is not None else ids

    def _token_id_fields(
        self,
        output: RunningOutput,
        ids: Sequence[int],
        spans: Sequence[WeightsSpan],
        *,
        first: bool,
    ) -> dict[str, Any]:
        if not self.request.return_token_ids:
            return {}
        prompt: dict[str, Any] = {}
        if first and not self.is_chat:
            prompt = {"prompt_token_ids": list(output.request.token_ids)}
        weights = [span.model_dump() for span in spans]
        return {**prompt, "token_ids": list(ids), "weights": weights}


class StreamedChunks:
    """A streamed answer: turns the engine's deltas into chunks."""

    def __init__(self, exchange: OpenAIExchange) -> None:
        self._exchange = exchange
        self._kind = "chat.completion.chunk" if exchange.is_chat else "text_completion"
        outputs = exchange.outputs
        self._indexes = {output: index for index, output in enumerate(outputs)}
        self._growing = {output: exchange.make_text() for output in outputs}
        marks = () if exchange.reading is None else exchange.reading.first_marks
        self._gates = {output: TextGate(marks) for output in outputs}
        self._made = dict.fromkeys(outputs, 0)
        options = exchange.request.stream_options
        self._has_usage = options is not None and options.include_usage
        self._counts_along = self._has_usage and bool(options and options.continuous_usage_stats)
        self._offset = dict.fromkeys(outputs, 0)

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """The chunks before the first token."""
        if not self._exchange.is_chat:
            return
        more: dict[str, Any] = {}
        if self._exchange.request.return_token_ids:
            ids = self._exchange.flights[0].outputs[0].request.token_ids
            more["prompt_token_ids"] = list(ids)
        for index in self._indexes.values():
            delta = {"role": "assistant", "content": ""}
            yield self._make_chunk([_partial_choice(index, delta=delta)], **more)

    def delta_chunk(self, flight: InFlightRequest, delta: StreamDelta) -> dict[str, Any]:
        """The chunk for new tokens; its text may be empty while a character is incomplete."""
        output, ids = flight.outputs[delta.index], delta.token_ids
        begin = self._made[output]
        self._made[output] += len(ids)
        last = output.stop_reason is not None and self._made[output] == len(output.token_ids)
        shown = self._exchange.visible_ids(ids, output) if last else ids
        choice = self._text_choice(output, self._growing[output].push_ids(shown))
        logprobs = self._exchange.logprobs_field(ids, delta.logprobs, self._offset[output])
        if logprobs and "tokens" in logprobs:
            self._offset[output] += sum(len(token) for token in logprobs["tokens"])
        more = self._exchange._token_id_fields(output, ids, delta.weights, first=not begin)
        return self._output_chunk(output, choice | {"logprobs": logprobs} | more)

    def closing_chunks(self) -> Iterator[dict[str, Any]]:
        """The closing chunks: held-back text, tool calls, finish reasons, usage if requested."""
        for output, index in self._indexes.items():
            rest, finish = self._growing[output].take_rest(), _finish_reason(output)
            if not self._exchange.is_chat:
                yield self._output_chunk(output, _partial_choice(index, finish, text=rest))
                continue
            delta: dict[str, Any] = {"content": rest}
            if self._exchange.reading is not None:
                gate = self._gates[output]
                before = self._exchange.reading.content_of(gate.push_text(rest))
                delta = self._exchange.reading.read_message(gate.held, output)
                delta["content"] = before + delta["content"]
                if "tool_calls" in delta:
                    calls = enumerate(delta["tool_calls"])
                    delta["tool_calls"] = [{"index": number, **call} for number, call in calls]
                    finish = "tool_calls" if finish == "stop" else finish
            if not delta["content"]:
                del delta["content"]
            yield self._output_chunk(output, _partial_choice(index, finish, delta=delta))
        if self._has_usage:
            yield self._make_chunk([], usage=self._exchange.token_usage())

    def _text_choice(self, output: RunningOutput, text: str) -> Choice:
        index = self._indexes[output]
        if not self._exchange.is_chat:
            return _partial_choice(index, text=text)
        if self._exchange.reading is not None:
            text = self._exchange.reading.content_of(self._gates[output].push_text(text))
        return _partial_choice(index, delta={"content": text})

    def _output_chunk(self, output: RunningOutput, choice: Choice) -> dict[str, Any]:
        if not self._counts_along:
            return self._make_chunk([choice])
        usage = _count_tokens(len(output.request.token_ids), self._made[output])
        return self._make_chunk([choice], usage=usage)

    def _make_chunk(self, choices: list[Choice], **more: Any) -> dict[str, Any]:
        return self._exchange.common_fields(self._kind, choices, **more)


def _partial_choice(index: int, finish: str | None = None, **what: Any) -> Choice:
    return {"index": index, **what, "logprobs": None, "finish_reason": finish}


def _count_tokens(prompt: int, made: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }


def _finish_reason(output: RunningOutput) -> str:
    return FINISH_REASONS[output.stop_reason or StopReason.ABORTED]
