"""Check what was trained on against what the engines answered, token by token.

A `Conversation` has both: the request, as it came out of the training batch, and the ledger of
prompts and answers that `tools.py` kept for each turn. The texts between the turns come from
neither: `calculator.py` says what they must be.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from calculator import END, Question, between, expression_of, opening
from rollout_client import GenerateResult, RolloutRequest

Identity = tuple[int, int]
Weights = tuple[int, int, bool]


@dataclass(frozen=True)
class Turn:
    """One turn of the ledger: the ids that were sent, and the answer."""

    prompt: list[int]
    result: GenerateResult


@dataclass(frozen=True)
class Conversation:
    """A conversation and its ledger.

    oldest, newest: the weights that were committed when it began, and those that were being
    published when it ended.
    """

    question: Question
    request: RolloutRequest
    turns: list[Turn]
    oldest: Identity
    newest: Identity


@dataclass(frozen=True)
class Token:
    """A token according to the ledger; weights: epoch, version, stale_kv, if it was sampled."""

    token: int
    logprob: float = 0.0
    weights: Weights | None = None


@dataclass
class Report:
    """What was checked; the check passes if it found no fault."""

    conversations: int = 0
    turns: int = 0
    tool_calls: int = 0
    sampled_tokens: int = 0
    stale_tokens: int = 0
    of_two_versions: int = 0
    attempts: Counter[str] = field(default_factory=Counter)
    replicas: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, conversation: Conversation) -> None:
        """Count a conversation."""
        spans = [span for turn in conversation.turns for span in turn.result.output.weights]
        self.conversations += 1
        self.turns += len(conversation.turns)
        self.tool_calls += sum(m["role"] == "tool" for m in conversation.request.messages)
        self.sampled_tokens += sum(span.end - span.start for span in spans)
        self.stale_tokens += sum(span.end - span.start for span in spans if span.stale_kv)
        self.of_two_versions += len({(span.epoch, span.version) for span in spans}) > 1
        for attempt in (a for turn in conversation.turns for a in turn.result.attempts):
            self.attempts[attempt.outcome] += 1
            self.replicas[attempt.replica] += attempt.outcome == "finished"


def check(
    asked: Sequence[Question], conversations: Sequence[Conversation], tokenizer: Any
) -> Report:
    """Return the report on all conversations of a training run.

    Args:
        asked: every question, once for each of its samples, in order.
        conversations: what was trained on, in the same order.
        tokenizer: the model's.
    """
    report = Report()
    if list(asked) != [each.question for each in conversations]:
        report.faults.append(f"{len(asked)} questions, not these {len(conversations)} answers")
    names = Counter(each.request.request_id for each in conversations)
    report.faults += [f"{name}: {n} times" for name, n in names.items() if n > 1]
    for each in conversations:
        report.add(each)
        report.faults += [f"{each.request.request_id}: {f}" for f in faults(each, tokenizer)]
    return report


def faults(conversation: Conversation, tokenizer: Any) -> Iterator[str]:
    """Yield what is wrong with one conversation."""
    for number, turn in enumerate(conversation.turns):
        yield from (f"turn {number}: {fault}" for fault in _answer_faults(turn, tokenizer))
    yield from _version_faults(conversation)
    yield from _text_faults(conversation, tokenizer)
    yield from _token_faults(conversation)
    yield from _end_faults(conversation, tokenizer)


def _answer_faults(turn: Turn, tokenizer: Any) -> Iterator[str]:
    """What an engine must not answer."""
    output, end = turn.result.output, tokenizer.convert_tokens_to_ids(END)
    ids, logprobs = output.token_ids, output.logprobs or ()
    if turn.result.logprobs_of != "sampling":
        yield f"logprobs of {turn.result.logprobs_of}"
    if len(logprobs) != len(ids) or not all(math.isfinite(x) and x <= 0 for x in logprobs):
        yield f"{len(ids)} tokens with logprobs {logprobs}"
    if output.stop_reason not in {"stop", "length"}:
        yield f"it ended by {output.stop_reason}"
    if not ids or end in ids[:-1] or (ids[-1] == end) != (output.stop_reason == "stop"):
        yield f"it ended by {output.stop_reason} with {ids}"
    edges = [0, *(span.end for span in output.weights)]
    if [span.start for span in output.weights] != edges[:-1] or edges[-1] != len(ids):
        yield f"its spans of weights do not cover its {len(ids)} tokens: {output.weights}"


def _version_faults(conversation: Conversation) -> Iterator[str]:
    """Check sampled tokens' weights: they could be serving then, and never go backwards."""
    last = conversation.oldest
    for span in (span for turn in conversation.turns for span in turn.result.output.weights):
        identity = span.epoch, span.version
        if not conversation.oldest <= identity <= conversation.newest:
            yield f"weights {identity}, not {conversation.oldest} to {conversation.newest}"
        if identity < last:
            yield f"weights {identity} behind {last}"
        last = identity


def _text_faults(conversation: Conversation, tokenizer: Any) -> Iterator[str]:
    """Check each prompt: everything so far, plus only what the task adds."""
    before: list[int] = []
    wanted = opening(conversation.question)
    for number, turn in enumerate(conversation.turns):
        if turn.prompt[: len(before)] != before:
            yield f"turn {number}: its prompt is not what was said so far"
        added = tokenizer.decode(turn.prompt[len(before) :])
        if added != wanted:
            yield f"turn {number}: {added!r} was added, not {wanted!r}"
        before = [*turn.prompt, *turn.result.token_ids]
        wanted = between(_text(turn, tokenizer), turn.result.output.stop_reason == "stop")


def _token_faults(conversation: Conversation) -> Iterator[str]:
    """Check every column of the request against the ledger."""
    request, tokens = conversation.request, list(_ledger(conversation.turns))
    prompt, length = len(conversation.turns[0].prompt), len(tokens)
    ids = [each.token for each in tokens]
    if list(request.prompt_ids) != ids[:prompt]:
        yield "the prompt is not what was sent first"
    if list(request.response_ids) != ids[prompt:]:
        yield "the response is not what was said after the prompt"
    if any(list(row) != list(range(length)) for row in request.position_ids):
        yield "positions do not count on"
    sampled = [int(each.weights is not None) for each in tokens]
    logprobs = array("f", [each.logprob for each in tokens])
    weights: list[Weights | None] = [None] * length
    for span in request.weights:
        made = (span.epoch, span.version, span.stale_kv)
        weights[span.start : span.end] = [made] * (span.end - span.start)
    columns: tuple[tuple[str, Sequence[Any], Sequence[Any]], ...] = (
        ("id", list(request.input_ids), ids),
        ("loss mask", list(request.loss_mask), sampled),
        ("response mask", [0] * prompt + list(request.response_mask), sampled),
        ("logprob", [0.0] * prompt + list(request.rollout_log_probs), logprobs),
        ("weights", weights, [each.weights for each in tokens]),
    )
    for name, have, want in columns:
        if len(have) != length:
            yield f"{len(have)} of {name}, not {length}"
        for at, (ours, theirs) in enumerate(zip(have, want, strict=False)):
            if ours != theirs:
                yield f"token {at}: {name} {ours}, not {theirs}"


def _ledger(turns: Sequence[Turn]) -> Iterator[Token]:
    """Yield every token of a conversation, as the engines received and returned them."""
    length = 0
    for turn in turns:
        yield from map(Token, turn.prompt[length:])
        output = turn.result.output
        weights: list[Weights] = []
        for span in output.weights:
            weights += [(span.epoch, span.version, span.stale_kv)] * (span.end - span.start)
        yield from map(Token, output.token_ids, output.logprobs or (), weights)
        length = len(turn.prompt) + len(output.token_ids)


def _end_faults(conversation: Conversation, tokenizer: Any) -> Iterator[str]:
    """Check how it ended, and its reward."""
    request, texts = conversation.request, [_text(turn, tokenizer) for turn in conversation.turns]
    reward = {"sum": [conversation.question.reward(texts[-1])]}
    expected: dict[str, tuple[object, object]] = {
        "state": (request.state, "completed"),
        "logprobs of": (request.logprobs_of, "sampling"),
        "reward": (request.reward_scores, reward),
        "cut tokens": (request.truncated_tokens, 0),
        "difference to a whole render": (request.difference, None),
        "calls answered": (
            sum(message["role"] == "tool" for message in request.messages),
            len(conversation.turns) - 1,
        ),
        "answers before the last that call": (
            sum(expression_of(text) is not None for text in texts[:-1]),
            len(texts) - 1,
        ),
    }
    for what, (have, want) in expected.items():
        if have != want:
            yield f"{what}: {have!r}, not {want!r}"


def _text(turn: Turn, tokenizer: Any) -> str:
    text: str = tokenizer.decode(turn.result.token_ids)
    return text.removesuffix(END)
