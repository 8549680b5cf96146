"""`Conversation`: a whole conversation with its token ids, masks, logprobs and weights.

It is pure data; methods that need the tokenizer or processor take it as an argument. Ids are only
appended: what the policy sampled is never tokenized again, and a turn costs only what it adds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from rollout_common.wire import GenerateOutput, LogprobsOf, StopReason, WeightsSpan

from .columns import INT32, ColumnView
from .conversation_data import FinishReason, RequestState
from .template_messages import (
    MEDIA_KEYS,
    ToolResponse,
    extract_media,
    parse_tool_call,
    plain_mapping,
)  # fmt: skip
from .writer import ConversationWriter, answer_message, check_spans, checked_logprobs


class Conversation(ConversationWriter):
    """A conversation between a policy, users and tools, as a trainer needs it.

    Create one with `from_messages`, send `get_generation_prompt_ids` to the engine, add turns as
    they arrive, then `finalize` it. Methods take the model's tokenizer or processor.
    """

    # Creating one.

    @classmethod
    def from_messages(
        cls,
        messages: Sequence[Any],
        processing_class: Any,
        *,
        max_prompt_len: int,
        tools: Sequence[Any] | None = None,
        multi_modal_data: Mapping[str, Sequence[Any]] | None = None,
        input_ids: Sequence[int] | None = None,
        attention_mask: Sequence[int] | None = None,
        **fields: Any,
    ) -> Self:
        """Render and tokenize the start of a conversation.

        Args:
            messages: Dicts or models; media in their content move to `multi_modal_data`.
            processing_class: The model's tokenizer, or its processor if there are media.
            max_prompt_len: Maximum tokens of the prompt; `overlong_prompt` says what happens above.
            tools: Their schemas, in OpenAI's format.
            multi_modal_data: Media for the placeholders in the messages, in order.
            input_ids: The prompt's ids, if already known.
            attention_mask: Mask of `input_ids`; ids where it is 0 are dropped.
            **fields: Any other fields.

        Raises:
            PromptTooLong: The prompt is too long and may not, or can't, be truncated.
            TemplateError: The template rejects the messages.
        """
        if not messages:
            raise ValueError("a conversation needs at least one message to start with")
        if unknown := sorted(set(multi_modal_data or ()) - set(MEDIA_KEYS)):
            raise ValueError(
                f"multi_modal_data: unknown keys {unknown}: use {', '.join(MEDIA_KEYS)}"
            )
        if attention_mask is not None:
            if len(attention_mask) != len(input_ids or ()):
                raise ValueError("attention_mask needs input_ids of the same length")
            pairs = zip(input_ids or (), attention_mask, strict=True)
            input_ids = [token for token, seen in pairs if seen]
        found = [extract_media(message) for message in messages]
        media = {key: list((multi_modal_data or {}).get(key, ())) for key in MEDIA_KEYS}
        for _, inner in found:
            for key, items in inner.items():
                media[key] += items
        request = cls.model_validate(
            {
                "messages": [message for message, _ in found],
                "tool_schemas": [plain_mapping(tool) for tool in tools or ()],
                "multi_modal_data": media,
                "max_prompt_len": max_prompt_len,
                **fields,
            }
        )
        request._begin_conversation(processing_class, input_ids)
        return request

    # Adding turns.

    def get_generation_prompt_ids(self, processing_class: Any) -> ColumnView[int]:
        """Open the assistant's turn if it is not open yet; return the ids to send to an engine.

        Costs only what it adds; the ids are a view (`tolist()` copies). With
        `use_inference_chat_template` they are those of the whole conversation as the template
        prints it now, and cost a full render.
        """
        self._check_open()
        template = self._template_for(processing_class)
        self._open_turn(template)
        self.state = RequestState.RUNNING
        return self._render_ids(template) if self.use_inference_chat_template else self.input_ids

    def add_user_message(self, processing_class: Any, content: Any) -> None:
        """Append a user message: text, or a list of content items with media."""
        self._add_group(processing_class, [extract_media({"role": "user", "content": content})])

    def add_messages(self, processing_class: Any, messages: Sequence[Any]) -> None:
        """Append user, tool or system messages, rendered together."""
        found = [extract_media(message) for message in messages]
        if any(message["role"] == "assistant" for message, _ in found):
            raise ValueError("use add_assistant_message for assistant messages")
        if found:
            self._add_group(processing_class, found)

    def add_tool_response_messages(
        self, processing_class: Any, contents: Sequence[ToolResponse | Any]
    ) -> None:
        """Append tool responses, one message each, rendered together; nothing if all are empty.

        Responses without an id get the ids of the calls that they answer, in order.
        """
        responses = [ToolResponse.of(content) for content in contents]
        if all(response.is_empty() for response in responses):
            return
        found = [response.message() for response in responses]
        last = self.messages[self.cursor.messages - 1]
        answered = len(self.messages) - self.cursor.messages
        calls = (last.get("tool_calls") or [])[answered:]
        for (message, _), call in zip(found, calls, strict=False):
            if "id" in call:
                message.setdefault("tool_call_id", call["id"])
            if "name" in call.get("function", {}):
                message.setdefault("name", call["function"]["name"])
        self._add_group(processing_class, found)
        self.state = RequestState.RUNNING

    def add_assistant_message(
        self,
        processing_class: Any,
        content: str | None = None,
        content_ids: Sequence[int] | None = None,
        tool_calls: Sequence[Any] | None = None,
        *,
        logprobs: Sequence[float] | None = None,
        logprobs_of: LogprobsOf = "sampling",
        weights: Sequence[WeightsSpan] = (),
        stop_token_id: int | None = None,
        **message: Any,
    ) -> None:
        """Append an answer: sampled ids, taken as they are, or text, which is tokenized.

        Args:
            processing_class: The model's tokenizer, or its processor.
            content: Its text without its calls; None: decoded from `content_ids`, without the
                token that ended it.
            content_ids: [T] ids that the policy sampled after the generation prompt.
            tool_calls: Calls in OpenAI's format.
            logprobs: [T] natural logs, finite; for all sampled turns of a request or for none.
            logprobs_of: Their kind, the same for the whole request.
            weights: Spans over `[0, T)`, as a worker returns them.
            stop_token_id: Id that ended the turn, if the engine reported one.
            **message: Further keys of the message, such as `reasoning_content`.

        Raises:
            ValueError: Logprobs or spans do not match the ids; the request is unchanged.
        """
        self._check_open()
        if content_ids is None:
            if content is None and not tool_calls:
                raise ValueError("give content, content_ids or tool_calls")
            if logprobs is not None or weights:
                raise ValueError("logprobs and weights need content_ids")
            self._add_text(processing_class, answer_message(content or "", tool_calls, message))
        else:
            ids = array(INT32, content_ids)
            values = None if logprobs is None else checked_logprobs(logprobs, len(ids))
            check_spans(weights, len(ids))
            self._check_kind(values is not None, logprobs_of)
            template = self._template_for(processing_class)
            if content is None:
                ends = template.end_ids | {stop_token_id}
                content = template.codec.decode(ids[:-1] if ids and ids[-1] in ends else ids)
                if tool_calls:
                    calls = [parse_tool_call(call) for call in tool_calls]
                    content = template.content_without_calls(content, calls)
            found = answer_message(content, tool_calls, message)
            self._open_turn(template)
            self.streams.append_tokens(
                ids, loss=True, sampled=True, logprobs=values, weights=weights
            )
            self.logprobs_of = logprobs_of if values is not None else self.logprobs_of
            self._append_answer(found, stop_token_id, sampled=True)
        self.state = RequestState.TOOL_CALLING if tool_calls else RequestState.RUNNING

    def add_output(
        self,
        processing_class: Any,
        output: GenerateOutput,
        *,
        logprobs_of: LogprobsOf | None = "sampling",
        content: str | None = None,
        tool_calls: Sequence[Any] | None = None,
    ) -> None:
        """Append a worker's output: ids, logprobs and the weights of every token."""
        match = output.stop_match
        stopped = match.token_id if match and output.stop_reason is StopReason.STOP else None
        self.add_assistant_message(
            processing_class,
            content,
            output.token_ids,
            tool_calls,
            logprobs=output.logprobs,
            logprobs_of=logprobs_of or "sampling",
            weights=output.weights,
            stop_token_id=stopped,
        )

    # Ending.

    def finalize(
        self,
        processing_class: Any,
        reward_scores: Mapping[str, list[float]] | None = None,
        finish_reason: FinishReason | str = FinishReason.STOP,
    ) -> None:
        """End the conversation: drop an open generation prompt, check, truncate to the limits.

        Prompt plus response are limited to `max_model_len`, the response to `max_response_len`; a
        turn with media is kept or cut as a whole. `truncated_tokens` counts what was cut; a cut
        turns the reason `stop` into `length`.

        Raises:
            ValueError: The reason can't end a conversation, the conversation has already ended, or
                scores are not lists of numbers; the request is unchanged.
        """
        reason = FinishReason(finish_reason)
        if reason is FinishReason.TOOL_CALLS:
            raise ValueError("tool_calls only ends a turn: answer the calls, then finalize")
        self._check_open()
        given = (reward_scores or {}).items()
        rewards = {key: _checked_scores(key, scores) for key, scores in given}
        self._cut_tokens(len(self.streams) - self.cursor.opened)
        self._check_messages(processing_class)
        self._truncate_tokens()
        cut = self.truncated_tokens and reason is FinishReason.STOP
        self.finish_reason = FinishReason.LENGTH if cut else reason
        self.reward_scores = rewards
        self.state = RequestState.COMPLETED

    def fail(self, reason: str) -> None:
        """End a conversation as failed; its tokens stay readable."""
        self._check_open()
        self._cut_tokens(len(self.streams) - self.cursor.opened)
        self.error = reason
        self.state = RequestState.FAILED


def _checked_scores(key: str, scores: Iterable[float]) -> list[float]:
    try:
        return [float(score) for score in scores]
    except (TypeError, ValueError):
        raise ValueError(f"reward_scores[{key!r}] is {scores!r}: give a list of numbers") from None
