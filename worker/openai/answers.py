"""Finished and streaming outputs in OpenAI's format."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_worker.requests.flights import Flight
from rollout_worker.requests.outputs import Output
from rollout_worker.schemas import StopReason, StreamDelta, WeightsSpan

from .models import ChatRequest, CompletionRequest
from .text import Growing
from .tool_calls import Gate, parse

Decode = Callable[[Sequence[int], bool], str]
Choice = dict[str, Any]

FINISH = {StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.ABORTED: "abort"}
"""`abort` is not an OpenAI value, but none of theirs says that the answer is incomplete."""


@dataclass(slots=True)
class Exchange:
    """One call to an OpenAI route: the request, and the flights that answer it."""

    id: str
    model: str
    request: ChatRequest | CompletionRequest
    flights: list[Flight]
    decode: Decode
    tools: bool = False
    """Whether to parse tool calls."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        """Whether this is the chat route."""
        return isinstance(self.request, ChatRequest)

    @property
    def most_calls(self) -> int | None:
        """How many calls of tools an answer may have: of more, the first ones; None: any number."""
        asked = self.request.parallel_tool_calls if isinstance(self.request, ChatRequest) else None
        return 1 if asked is False else None

    def growing(self) -> Growing:
        """For the text of one output."""
        special = not self.request.skip_special_tokens
        return Growing(self.decode, self.request.stops, special=special)

    def outputs(self) -> Iterator[tuple[int, Flight, Output]]:
        """Every output with the index of its choice, prompt by prompt."""
        index = 0
        for flight in self.flights:
            for output in flight.outputs:
                yield index, flight, output
                index += 1

    def oldest(self) -> WeightsSpan | None:
        """The span of the oldest weights that have produced a token so far."""
        spans = [span for _, _, output in self.outputs() for span in output.spans]
        return min(spans, key=lambda span: (span.epoch, span.version), default=None)

    def envelope(self, kind: str, choices: list[Choice], **more: Any) -> dict[str, Any]:
        """The fields common to every answer and chunk."""
        about = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**about, "choices": choices, **more}

    def usage(self) -> dict[str, Any]:
        """Token counts over all prompts and outputs."""
        prompt = sum(len(flight.outputs[0].request.token_ids) for flight in self.flights)
        made = sum(len(output.token_ids) for _, _, output in self.outputs())
        cached = sum(output.cached_tokens for _, _, output in self.outputs())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def logprobs(
        self, ids: Sequence[int], logprobs: Sequence[float] | None, offset: int = 0
    ) -> dict[str, Any] | None:
        """Logprobs of these tokens, in the route's format; None if they were not requested."""
        if logprobs is None:
            return None
        as_ids = self.request.return_tokens_as_token_ids
        texts = [f"token_id:{i}" if as_ids else self.decode([i], True) for i in ids]
        if self.chat:
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

    def answer(self) -> dict[str, Any]:
        """The answer, once every output has ended."""
        choices = [self._choice(*each) for each in self.outputs()]
        kind = "chat.completion" if self.chat else "text_completion"
        more: dict[str, Any] = {"usage": self.usage()}
        if self.chat and self.request.return_token_ids:
            more["prompt_token_ids"] = list(self.flights[0].outputs[0].request.token_ids)
        return self.envelope(kind, choices, **more)

    def _choice(self, index: int, flight: Flight, output: Output) -> Choice:
        asked = output.request.logprobs is not None
        growing = self.growing()
        text = growing.push(_said(output.token_ids, output)) + growing.end()
        choice: Choice = {
            "index": index,
            "logprobs": self.logprobs(output.token_ids, output.logprobs if asked else None),
            "finish_reason": _finish(output),
        }
        if self.chat:
            content, calls = parse(text) if self.tools else (text, [])
            calls = calls[: self.most_calls]
            message = {"role": "assistant", "content": content or (None if calls else "")}
            choice["message"] = {**message, "tool_calls": calls} if calls else message
            if calls and output.stop_reason is StopReason.STOP:
                choice["finish_reason"] = "tool_calls"
        else:
            choice["text"] = text
        return choice | self._ids(flight, output.token_ids, output.spans, first=True)

    def _ids(
        self,
        flight: Flight,
        ids: Sequence[int],
        spans: Sequence[WeightsSpan],
        *,
        first: bool,
    ) -> dict[str, Any]:
        if not self.request.return_token_ids:
            return {}
        prompt: dict[str, Any] = {}
        if first and not self.chat:
            prompt = {"prompt_token_ids": list(flight.outputs[0].request.token_ids)}
        weights = [span.model_dump() for span in spans]
        return {**prompt, "token_ids": list(ids), "weights": weights}


class Chunks:
    """A streamed answer: turns the engine's deltas into chunks."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._kind = "chat.completion.chunk" if exchange.chat else "text_completion"
        self._outputs = {(id(f), o.index): (i, f, o) for i, f, o in exchange.outputs()}
        self._growing = {key: exchange.growing() for key in self._outputs}
        self._gates = {key: Gate() for key in self._outputs}
        self._made = dict.fromkeys(self._outputs, 0)
        self._offset = dict.fromkeys(self._outputs, 0)

    def first(self) -> Iterator[dict[str, Any]]:
        """The chunks before the first token."""
        if not self._exchange.chat:
            return
        more: dict[str, Any] = {}
        if self._exchange.request.return_token_ids:
            ids = self._exchange.flights[0].outputs[0].request.token_ids
            more["prompt_token_ids"] = list(ids)
        for index, _, _ in self._outputs.values():
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([_piece(index, delta=delta)], **more)

    def delta(self, flight: Flight, delta: StreamDelta) -> dict[str, Any]:
        """The chunk for new tokens; its text may be empty while a character is incomplete."""
        key = (id(flight), delta.index)
        index, _, output = self._outputs[key]
        begin, ids = self._made[key], delta.token_ids
        self._made[key] += len(ids)
        last = output.stop_reason is not None and self._made[key] == len(output.token_ids)
        text = self._growing[key].push(_said(ids, output) if last else ids)
        logprobs = self._exchange.logprobs(ids, delta.logprobs, self._offset[key])
        if logprobs and "tokens" in logprobs:
            self._offset[key] += sum(len(token) for token in logprobs["tokens"])
        more = self._exchange._ids(flight, ids, delta.weights, first=not begin)
        return self._chunk([self._text(index, key, text) | {"logprobs": logprobs} | more])

    def ends(self) -> Iterator[dict[str, Any]]:
        """The closing chunks: held-back text, tool calls, finish reasons, usage if requested."""
        for key, (index, _, output) in self._outputs.items():
            rest, finish = self._growing[key].end(), _finish(output)
            if not self._exchange.chat:
                yield self._chunk([_piece(index, finish, text=rest)])
                continue
            delta: dict[str, Any] = {"content": rest} if rest else {}
            if self._exchange.tools:
                visible = self._gates[key].push(rest)
                content, calls = self._gates[key].end()
                calls = calls[: self._exchange.most_calls]
                delta = {"content": visible + content} if visible + content else {}
                if calls:
                    delta["tool_calls"] = [{"index": n, **c} for n, c in enumerate(calls)]
                    finish = "tool_calls" if finish == "stop" else finish
            yield self._chunk([_piece(index, finish, delta=delta)])
        options = self._exchange.request.stream_options
        if options is not None and options.include_usage:
            yield self._chunk([], usage=self._exchange.usage())

    def _text(self, index: int, key: tuple[int, int], text: str) -> Choice:
        if not self._exchange.chat:
            return _piece(index, text=text)
        if self._exchange.tools:
            text = self._gates[key].push(text)
        return _piece(index, delta={"content": text})

    def _chunk(self, choices: list[Choice], **more: Any) -> dict[str, Any]:
        return self._exchange.envelope(self._kind, choices, **more)


def _piece(index: int, finish: str | None = None, **what: Any) -> Choice:
    return {"index": index, **what, "logprobs": None, "finish_reason": finish}


def _finish(output: Output) -> str:
    return FINISH[output.stop_reason or StopReason.ABORTED]


def _said(ids: Sequence[int], output: Output) -> Sequence[int]:
    """The ids without the stop id that ended the output, which is not part of the text."""
    match = output.stop_match
    return ids[:-1] if match is not None and match.token_id is not None else ids
