"""Which requests every engine refuses, and when an output ends: EOS, stop ids, stop strings, length."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rollout_common.wire import MAX_RECORD_BYTES, SamplingParams, StopMatch, StopReason
from rollout_worker.engine import EngineRequest, InvalidRequest
from rollout_worker.engines.model_folder import decode_tokens

StopVerdict = tuple[StopReason, StopMatch | None]
DecodeTokens = Callable[[Sequence[int]], str]

INCOMPLETE_TOKENS = 3
"""An incomplete character has at most 3 of its 4 bytes, hence is in the last 3 tokens."""
MAX_INCOMPLETE_TOKENS = 16
"""Tokens after which text that never becomes complete is taken as it is: decoded whole with each of its tokens, a run of
such bytes would take time quadratic in its length."""
MAX_MASK_BYTES = 2**28
"""Of the masks of one output: 14,000 tokens of a vocabulary of 152,000, or 65,000 with a `top_k` of 1,024."""
REPLACEMENT_CHARACTER = "\ufffd"
"""What a decoder writes for a character whose last bytes have not arrived yet, and for bytes that are none."""
"""What bytes decode to that are not a character, or not yet."""


def stop_ids(sampling: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    """Return the ids that end an output of this request."""
    named = frozenset(sampling.stop_token_ids)
    return named if sampling.ignore_eos else named | eos


class ServedModel(Protocol):
    """What requests are checked against; each engine has its own description of a model."""

    @property
    def max_length(self) -> int:
        """Of prompt and output together, in tokens."""

    @property
    def vocab_size(self) -> int:
        """How many token ids there are."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an output unless its request ignores them."""

    @property
    def tokenizer(self) -> Any | None:
        """Finds stop strings."""


def check_id_unused(request_id: str, running: Collection[str]) -> None:
    """Raise `InvalidRequest` if another request has this id."""
    if request_id in running:
        raise InvalidRequest("request_id", f"request {request_id!r} runs already: use another id")


def check_temperature(
    request: EngineRequest, engine: str, least: float, most: float | None = None
) -> None:
    """Raise `InvalidRequest` for a temperature at which the engine would fail or silently use another one."""
    asked = request.sampling.temperature
    if asked == 0 or (least <= asked and (most is None or asked <= most)):
        return
    able = f"or at least {least:g}" if most is None else f"or from {least:g} to {most:g}"
    raise InvalidRequest(
        "sampling.temperature", f"{engine} can't draw at {asked:g}: use 0 (greedy), {able}"
    )


def with_known_tokens(request: EngineRequest, model: ServedModel) -> EngineRequest:
    """Return the request with at most as many `top_logprobs` as there are tokens: engines would fail at more."""
    if request.top_logprobs <= model.vocab_size:
        return request
    return replace(request, top_logprobs=model.vocab_size)


def check_model_limits(request: EngineRequest, model: ServedModel) -> None:
    """Raise `InvalidRequest` with the field and the fix for what no engine can serve with this model."""
    sampling = request.sampling
    allowed = sampling.allowed_token_ids
    for field, ids in (
        ("token_ids", request.token_ids),
        ("sampling.logit_bias", sampling.logit_bias),
        ("sampling.allowed_token_ids", allowed or ()),
        ("sampling.stop_token_ids", sampling.stop_token_ids),
    ):
        if odd := [token for token in ids if not 0 <= token < model.vocab_size]:
            known = f"use 0 to {model.vocab_size - 1}"
            raise InvalidRequest(field, f"token id {odd[0]} is not in the vocabulary: {known}")
    if not request.token_ids:
        raise InvalidRequest("token_ids", "the prompt is empty: give at least one token id")
    worst = min(4 * sampling.top_k or model.vocab_size, -(-model.vocab_size // 8))
    if request.masks and (sampling.max_tokens or 0) * worst > MAX_MASK_BYTES:
        raise InvalidRequest(
            "return_sampling_mask",
            f"max_tokens {sampling.max_tokens} with up to {worst} bytes each are more than the {MAX_MASK_BYTES} that an"
            " output holds: set sampling.top_k, or lower sampling.max_tokens",
        )
    if sampling.stop and model.tokenizer is None:
        raise InvalidRequest(
            "sampling.stop",
            "the model has no tokenizer to find stop strings with: use stop_token_ids",
        )
    if (
        sampling.min_tokens
        and allowed is not None
        and stop_ids(sampling, model.eos_token_ids).issuperset(allowed)
    ):
        raise InvalidRequest(
            "sampling.allowed_token_ids",
            "min_tokens forbids every allowed id, as all of them end the output: allow "
            "another id or set min_tokens to 0",
        )


def check_route_size(request: EngineRequest, row_bytes: int) -> None:
    """Raise `InvalidRequest` if the routes of all outputs are more than a response holds; `row_bytes`: of one token."""
    if request.routed_from is None:
        return
    tokens = len(request.token_ids) + request.outputs * (request.sampling.max_tokens or 0)
    if tokens * row_bytes > MAX_RECORD_BYTES:
        raise InvalidRequest(
            "return_routed_experts",
            f"{tokens} tokens of {row_bytes} bytes each are more than the {MAX_RECORD_BYTES} that a response holds:"
            " shorten the prompt, or lower sampling.max_tokens or sampling.n",
        )


class TextTail:
    """Decodes an output token by token; keeps only as much text as a stop string needs."""

    def __init__(self, decode: DecodeTokens, keep: int) -> None:
        self._decode = decode
        self._keep = keep
        self._context: list[int] = []  # returned already; the spacing of later text depends on it
        self._fresh: list[int] = []
        self._text = ""
        self._seen = 0  # characters at the start of the text that were returned before

    def push_token(self, token: int) -> tuple[str, int]:
        """Add a token; return the kept text with what the token completed, and where that begins."""
        self._fresh.append(token)
        before = len(self._decode(self._context))
        after = self._decode(self._context + self._fresh)
        whole = not after.endswith(REPLACEMENT_CHARACTER)
        # An incomplete character at the end may become complete: it is not returned before.
        text = self._text + after[before:].rstrip(REPLACEMENT_CHARACTER if not whole else "")
        begin, self._seen = self._seen, max(self._seen, len(text))
        cut = len(self._fresh) if whole else self._count_settled(after)
        if cut:
            self._drop_text(cut, self._decode(self._context + self._fresh[:cut])[before:])
        return text, begin

    def _count_settled(self, after: str) -> int:
        """Return how many fresh tokens later ones can't change, given the text with all of them."""
        last = len(self._fresh) - INCOMPLETE_TOKENS
        for cut in range(last, 0, -1):
            # Any other cut would split a character.
            if after.startswith(self._decode(self._context + self._fresh[:cut])):
                return cut
        return last if len(self._fresh) >= MAX_INCOMPLETE_TOKENS else 0

    def _drop_text(self, cut: int, shown: str) -> None:
        self._context, self._fresh = self._fresh[:cut], self._fresh[cut:]
        text = self._text + shown
        self._text = text[-self._keep :] if self._keep else ""
        self._seen = max(0, self._seen - (len(text) - len(self._text)))


class StopChecker:
    """Checks each token of one output; none of the first `min_tokens` ends it."""

    def __init__(
        self, sampling: SamplingParams, eos: frozenset[int], decode: DecodeTokens | None
    ) -> None:
        self._ids = stop_ids(sampling, eos)
        self._strings = sampling.stop
        self._min, self._max = sampling.min_tokens, sampling.max_tokens
        longest = max((len(text) for text in self._strings), default=0)
        # The kept text may have all but the newest character of the longest string.
        self._tail = TextTail(decode, longest - 1) if decode and self._strings else None

    def check_token(self, token: int, produced: int) -> StopVerdict | None:
        """Return why the output ends with `token`, its `produced`-th, or None if it goes on."""
        text = self._completed_stop(token)
        if produced > self._min:
            if token in self._ids:
                return StopReason.STOP, StopMatch(token_id=token)
            if text is not None:
                return StopReason.STOP, StopMatch(text=text)
        if self._max is not None and produced >= self._max:
            return StopReason.LENGTH, None
        return None

    def _completed_stop(self, token: int) -> str | None:
        """Return the stop string that this token completes; of several, the one that begins first."""
        if self._tail is None:
            return None
        text, fresh = self._tail.push_token(token)
        hits = [
            (at, stop)
            for stop in self._strings
            # A string that ends before the fresh text was completed by an earlier token.
            if (at := text.find(stop, max(0, fresh - len(stop) + 1))) >= 0
        ]
        return min(hits, key=lambda hit: hit[0])[1] if hits else None


def make_stop_checker(sampling: SamplingParams, model: ServedModel) -> StopChecker:
    """Return the checker for one output of this model."""

    def decode_text(token_ids: Sequence[int]) -> str:
        return decode_tokens(model.tokenizer, token_ids, special=True)

    return StopChecker(
        sampling, model.eos_token_ids, None if model.tokenizer is None else decode_text
    )
