"""The outputs that the engine makes, and how it draws one token for each of a batch."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_common.wire import AbortReason, StopReason, WeightsId
from rollout_worker.engine import EngineDelta, EngineRequest
from rollout_worker.engines.grammars.grammar_state import GrammarState, fill_masks
from rollout_worker.engines.picture_model import banned_tokens
from rollout_worker.engines.request_checks import (
    StopChecker,
    StopVerdict,
    make_stop_checker,
    stop_ids,
    with_known_tokens,
)
from rollout_worker.engines.sampling.asks import sampling_asks
from rollout_worker.engines.sampling.batch_rows import SampledRow, SampledRows
from rollout_worker.engines.sampling.scoring import PromptScoring
from rollout_worker.engines.sampling.token_draw import DrawRecords, draw_tokens, pack_mask_row
from rollout_worker.engines.weight_versions import WeightsChange, spans_within
from rollout_worker.replay_records import ExpertRoutes, TokenMasks
from rollout_worker.token_scores import PromptScores, TopTokens

from .expert_routes import RouterRecorder
from .picture_features import PictureEncoder, PromptPictures
from .weights.loading import LoadedModel

LEAST_TEMPERATURE = 1e-30
"""Smaller ones leave the range of float32; these are greedy but for equal logits already."""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What was recorded of one draw: a row of the most likely tokens, and one of `TokenMasks`; None if not asked for."""

    top: TopTokens | None = None
    mask: tuple[int, bytes] | None = None


NO_RECORD = TokenRecord()


@dataclass(slots=True, eq=False)
class OutputSequence:
    """Prompt and output of one request so far, and how much of them the KV cache holds.

    The rest (`pending_tokens`) must go through the model: one token in normal decoding, the whole prefix
    at first and after its KV was lost. `stale` says that the KV holds entries of older weights,
    `pinned` that it runs on the weights before the active ones. `take_delta` hands tokens over,
    one or many at a time.
    """

    request: EngineRequest
    row: SampledRow
    stop: StopChecker
    arrival: int
    sink: Callable[[EngineDelta], None]
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    stale: bool = False
    pinned: bool = False
    preemptions: int = 0
    done: bool = False
    entered: float = field(default_factory=time.monotonic)
    started: float | None = None
    _prompt: int = 0
    _delivered: int = 0
    _logprobs: list[float] = field(default_factory=list)
    _top: TopTokens | None = None
    scoring: PromptScoring | None = None
    """Of the prompt, until it is complete."""
    pictures: PromptPictures | None = None
    _scores: PromptScores | None = None
    routes: ExpertRoutes | None = None
    """The experts of the tokens that were read, without those that were delivered; None: not asked for."""
    _masks: list[tuple[int, bytes]] = field(default_factory=list)
    vocab_size: int = 0
    _changes: list[WeightsChange] = field(default_factory=list)
    _verdict: StopVerdict | None = None
    _abort: AbortReason | None = None
    grammar: GrammarState | None = None
    grammar_error: str | None = None
    not_finite: WeightsId | None = None
    """The weights whose logits were not finite, which aborted it."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.token_ids)
        self._prompt = len(self.tokens)
        if self.request.scored is not None:
            self.scoring = PromptScoring(*self.request.scored, self.request.top_logprobs)

    @property
    def produced(self) -> int:
        """Length of the output so far."""
        return len(self.tokens) - self._prompt

    @property
    def temperature(self) -> float:
        """What its logits are divided by; 0: it takes the most likely token."""
        return self.request.sampling.temperature

    @property
    def pending_tokens(self) -> int:
        """How many tokens the model has not read yet."""
        return len(self.tokens) - self.cached

    @property
    def reserved_tokens(self) -> int:
        """The most tokens that prompt and output can become."""
        return self._prompt + (self.request.sampling.max_tokens or 0)

    @property
    def is_urgent(self) -> bool:
        """Whether the reader waits for what is undelivered: its first token, or its end."""
        return self.done or not self._delivered

    @property
    def has_undelivered(self) -> bool:
        """Whether it has tokens that `take_delta` has not returned."""
        return self.produced > self._delivered

    def forget_kv(self) -> None:
        """Note that the KV cache holds nothing of it any more."""
        self.cached = 0
        self.stale = False
        if self.scoring is not None:
            self.scoring.forget_scores()
        if self.routes is not None and not self.produced:
            self.routes.data.clear()

    def append_routes(self, rows: bytes, count: int) -> None:
        """Append the experts of the next `count` tokens [count, layers, top_k], but of none that was read before."""
        assert self.routes is not None
        begin = self.routes.end - self.cached
        self.routes.data += rows[max(0, begin) * self.routes.row_bytes :] if begin < count else b""

    def scored_tokens(self, count: int) -> range:
        """Return which of the next `count` tokens are followed by positions to score, by index."""
        if self.scoring is None:
            return range(0)
        found = self.scoring.wanted_in(self.cached, self.cached + count)
        return range(found.start - self.cached, found.stop - self.cached)

    def score_tokens(self, logits: Tensor, count: int) -> None:
        """Score the positions after `scored_tokens(count)`, from the logits [S, V] after these."""
        assert self.scoring is not None
        found = self.scoring.wanted_in(self.cached, self.cached + count)
        self.scoring.add_scores(logits, self.tokens[found.start + 1 : found.stop + 1])

    def is_drawn_after(self, count: int) -> bool:
        """Return whether a token is drawn once the model has read `count` more."""
        return count == self.pending_tokens and self.request.sampling.max_tokens != 0

    def finish_prompt(self, weights: WeightsId) -> None:
        """Note that the prompt is scored as a whole; ends an output of no tokens."""
        assert self.scoring is not None
        hidden = self.row.asks.get("never", ())
        scores = self.scoring.finish_scores(weights).without_tokens(self.request.token_ids, hidden)
        self.scoring = None
        if not scores.are_finite:
            self.abort_output(AbortReason.ENGINE, not_finite=weights)
            return
        self._scores = scores
        if self.request.sampling.max_tokens == 0:
            self.done, self._verdict = True, (StopReason.LENGTH, None)

    def append_token(
        self, token: int, logprob: float, weights: WeightsId, record: TokenRecord = NO_RECORD
    ) -> None:
        """Append a drawn token with what was recorded of its draw; sets `done` with the last one."""
        start = self.produced
        last = self._changes[-1] if self._changes else None
        if last is None or last[1] is not weights or last[2] is not self.stale:
            self._changes.append((start, weights, self.stale))
        self.tokens.append(token)
        self._logprobs.append(logprob)
        if self._top is None:
            self._top = record.top
        elif record.top is not None:
            self._top.extend(record.top)
        if record.mask is not None:
            self._masks.append(record.mask)
        self._verdict = self.stop.check_token(token, start + 1)
        self.done = self._verdict is not None
        if self.grammar is not None and not self.done:
            self.grammar_error = self.grammar.accept_token(token)
            if self.grammar_error is not None:
                self.abort_output(AbortReason.ENGINE)

    def abort_output(self, reason: AbortReason, not_finite: WeightsId | None = None) -> None:
        """End it before its time, perhaps because of weights whose logits are not finite; it keeps its tokens."""
        self.done = True
        self._abort, self.not_finite = reason, not_finite

    def take_delta(self) -> EngineDelta:
        """Return what is new since the last call, with the reason once the output has ended."""
        begin, end = self._delivered, self.produced
        reason, match = self._verdict or (None, None)
        if self._abort is not None:
            reason, match = StopReason.ABORTED, None
        logprobs = None if self.request.logprobs is None else tuple(self._logprobs)
        found = EngineDelta(
            token_ids=tuple(self.tokens[self._prompt + begin :]),
            logprobs=logprobs,
            spans=spans_within(self._changes, begin, end),
            stop_reason=reason,
            stop_match=match,
            abort_reason=self._abort,
            not_finite=self.not_finite,
            grammar_error=self.grammar_error,
            preemptions=self.preemptions,
            queued_seconds=(self.started or time.monotonic()) - self.entered,
            top=self._top,
            prompt=self._scores,
            routes=self._take_routes(end - begin),
            masks=self._take_masks(),
        )
        self._top = self._scores = None
        self._delivered = end
        self._logprobs.clear()
        self._changes.clear()
        return found

    def _take_routes(self, tokens: int) -> ExpertRoutes | None:
        if self.routes is None or not tokens:
            return None
        found = self.routes
        end = self._prompt + self.produced - 1
        self.routes = found.slice_rows(end, found.end)
        return found.slice_rows(found.start, end)

    def _take_masks(self) -> TokenMasks | None:
        if not self._masks:
            return None
        counts, rows = zip(*self._masks, strict=True)
        self._masks.clear()
        return TokenMasks(self.vocab_size, list(counts), list(rows))


def make_sequence(
    request: EngineRequest,
    loaded: LoadedModel,
    arrival: int,
    sink: Callable[[EngineDelta], None],
    *,
    grammar: GrammarState | None = None,
    routers: RouterRecorder | None = None,
    encoder: PictureEncoder | None = None,
) -> OutputSequence:
    """Make the output of a checked request; `sink` takes its deltas, in the asyncio loop."""
    request = with_known_tokens(request, loaded)
    stops = stop_ids(request.sampling, loaded.eos_token_ids)
    asks = sampling_asks(request, stops, banned_tokens(loaded.pictures))
    # Not from torch's generator: it may be a trainer's, and have the same seed on each replica.
    asks.setdefault("seed", secrets.randbits(63))
    routes = None
    if request.routed_from is not None and routers is not None:
        routes = ExpertRoutes(request.routed_from, routers.layers, routers.top_k, routers.dtype)
    return OutputSequence(
        request=request,
        row=SampledRow(asks, request.token_ids, ()),
        stop=make_stop_checker(request.sampling, loaded),
        arrival=arrival,
        sink=sink,
        grammar=grammar,
        routes=routes,
        vocab_size=loaded.vocab_size,
        pictures=encoder.place_prompt(request) if encoder else None,
    )


class BatchSampler:
    """Draws for a batch; what depends on the batch alone is kept until the batch changes."""

    def __init__(self) -> None:
        self._sequences: list[OutputSequence] = []
        self._rows = SampledRows([], torch.device("cpu"))
        self._temperatures = torch.empty(0, 1)

    def draw_tokens(
        self,
        logits: Tensor,
        sequences: Sequence[OutputSequence],
        records: dict[int, TokenRecord] | None = None,
    ) -> tuple[list[int], list[float]]:
        """Draw a token for each row from `logits` [B, V].

        Returns tokens [B] and natural log-probabilities [B]. A log-probability that is not finite says that the
        row's logits were not, and its token means nothing. `records` gets what rows ask for
        besides.
        """
        if list(sequences) != self._sequences:
            self._sequences = list(sequences)
            self._rows = SampledRows([each.row for each in sequences], logits.device)
            values = [max(each.temperature, LEAST_TEMPERATURE) for each in sequences]
            heat = torch.tensor(values, device=logits.device)
            self._temperatures = heat.masked_fill_(self._rows.greedy_rows, 1).unsqueeze(1)
        last = [len(each.row.prompt) + each.produced - 1 for each in sequences]
        positions = torch.tensor(last, device=logits.device)
        work = logits.to(torch.float32, copy=True)
        found = DrawRecords()
        masks = fill_masks([each.grammar for each in sequences], logits.device)
        tokens, logprobs = draw_tokens(
            work, self._rows, self._temperatures, positions, found, masks
        )
        for row in found.top.keys() | found.allowed.keys():
            assert records is not None, "the caller knows that a row asks for it"
            records[row] = _make_record(found, row)
        return tokens.tolist(), logprobs.tolist()


def _make_record(found: DrawRecords, row: int) -> TokenRecord:
    top = mask = None
    if row in found.top:
        ids, likely = found.top[row]
        top = TopTokens(len(ids))
        top.append_row(ids.tolist(), likely.tolist())
    if row in found.allowed:
        mask = pack_mask_row(found.allowed[row])
    return TokenRecord(top, mask)
