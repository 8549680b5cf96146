"""One output on its way through vLLM: what vLLM makes becomes deltas."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_common.wire import (
    CHECKPOINT,
    AbortReason,
    StopMatch,
    StopReason,
    WeightsId,
    WeightsSpan,
)
from rollout_worker.engine import EngineDelta, EngineRequest
from rollout_worker.engines.request_checks import StopChecker
from rollout_worker.engines.vllm.ranks.draw_masks import read_masks
from rollout_worker.engines.weight_versions import WeightsChange, spans_within
from rollout_worker.token_scores import PromptScores, TopTokens

OutputEnding = tuple[StopReason, StopMatch | None, AbortReason | None]
NOT_FINITE_ENDING: OutputEnding = (StopReason.ABORTED, None, AbortReason.ENGINE)


class WeightLabels:
    """Which weights made which token: the labels so far, one for each commit.

    vLLM stamps the outputs of every step with a label, which is set at a commit while nothing steps,
    and records for each request where in its output each label began. So spans are exact, however
    many steps' outputs arrive together.
    """

    def __init__(self) -> None:
        # For each label: its weights, and whether running requests kept their KV.
        self._meanings: dict[str, tuple[WeightsId, bool]] = {"0": (CHECKPOINT, False)}
        self.current = "0"

    @property
    def current_weights(self) -> WeightsId:
        """The weights of the current label."""
        return self._meanings[self.current][0]

    def make_label(self, identity: WeightsId, *, kept: bool) -> str:
        """Return the label of a new commit; `adopt_label` makes it current."""
        label = str(int(self.current) + 1)
        self._meanings[label] = (identity, kept)
        return label

    def adopt_label(self, label: str) -> None:
        """Make a label current: vLLM stamps it from now on."""
        self.current = label

    def token_spans(
        self, starts: Sequence[tuple[str, int]], begin: int, end: int
    ) -> tuple[WeightsSpan, ...]:
        """Return the spans of the tokens [begin, end) of an output.

        `starts`: (label, index of its first token) in order. KV is stale in tokens of a later
        label than the output's first one, unless it was computed again at the commit.
        """
        changes: list[WeightsChange] = []
        for index, (label, start) in enumerate(starts):
            identity, kept = self._meanings[label]
            changes.append((start, identity, kept and index > 0))
        return spans_within(changes, begin, end)


@dataclass(slots=True, eq=False)
class VllmStream:
    """The reader's end of one output.

    `admission`: done once it may go to vLLM, or must stop waiting. `inside`, `state`: its id and state in vLLM,
    while vLLM has it; `placed`: when it got it. `returned`: it was requeued before its first token. `scored`: its prompt's scores were read; `hidden`: tokens that
    have none.
    """

    request: EngineRequest
    arrival: int
    stops: StopChecker | None
    hidden: frozenset[int] = frozenset()
    produced: int = 0
    scored: bool = False
    admission: asyncio.Future[None] | None = None
    inside: str | None = None
    state: Any = None
    returned: bool = False
    aborting: AbortReason | None = None
    ended: bool = False
    entered: float = field(default_factory=time.monotonic)
    started: float | None = None
    placed: float = 0.0

    @property
    def name(self) -> str:
        """Its request id."""
        return self.request.request_id

    @property
    def done(self) -> bool:
        """Whether it does not wait for admission."""
        return self.admission is None or self.admission.done()

    def stop_waiting(self) -> None:
        """End its wait for admission, whether it is admitted or not."""
        if self.admission is not None and not self.admission.done():
            self.admission.set_result(None)

    def take_output(self, output: Any, labels: WeightLabels) -> EngineDelta:
        """Turn what vLLM made into a delta; the last one sets `ended`."""
        completion = output.outputs[0]
        tokens: Sequence[int] = completion.token_ids
        starts = self._label_starts(completion)
        chosen, top = split_logprobs(completion.logprobs, len(tokens), self.request)
        prompt = self._take_prompt_scores(output, starts, labels)
        count, ending = self._cut_tokens(tokens, chosen)
        if prompt is not None and not prompt.are_finite:
            prompt, count, ending = None, 0, NOT_FINITE_ENDING
        elif self.request.sampling.max_tokens == 0:
            count, ending = 0, self._scoring_ending(completion)
        bad = None
        if ending is NOT_FINITE_ENDING:
            bad = self._token_weights(self.produced + count, starts, labels)
        ending = ending or self._vllm_ending(completion)
        stats = None if self.state is None else self.state.stats
        begin, self.produced = self.produced, self.produced + count
        self.ended = ending is not None
        reason, match, abort = ending or (None, None, None)
        return EngineDelta(
            token_ids=tuple(tokens[:count]),
            logprobs=None if self.request.logprobs is None else tuple((chosen or ())[:count]),
            spans=labels.token_spans(starts, begin, self.produced),
            stop_reason=reason,
            stop_match=match,
            abort_reason=abort,
            not_finite=bad,
            cached_tokens=output.num_cached_tokens or 0,
            preemptions=0 if stats is None else stats.num_preemptions,
            queued_seconds=self._queued_seconds(),
            top=None if top is None else top.slice_rows(0, count),
            prompt=prompt,
            masks=read_masks(completion.sampling_mask, count) if self.request.masks else None,
        )

    def _queued_seconds(self) -> float:
        return (self.started or time.monotonic()) - self.entered

    def _take_prompt_scores(
        self, output: Any, starts: Sequence[tuple[str, int]], labels: WeightLabels
    ) -> PromptScores | None:
        """Return the scores of the prompt, which come with the first token."""
        if self.request.scored is None or self.scored or not output.outputs[0].token_ids:
            return None
        self.scored = True
        weights = self._token_weights(0, starts, labels)
        found = output.prompt_logprobs or None
        return read_scores(self.request, found, weights, self.hidden)

    def _scoring_ending(self, completion: Any) -> OutputEnding | None:
        """Return why an output of no tokens ends: not by the token that vLLM made all the same."""
        ending = self._vllm_ending(completion)
        made = ending is not None and ending[0] is not StopReason.ABORTED
        return (StopReason.LENGTH, None, None) if made else ending

    def _token_weights(
        self, index: int, starts: Sequence[tuple[str, int]], labels: WeightLabels
    ) -> WeightsId:
        for span in labels.token_spans(starts, index, index + 1):
            return WeightsId(epoch=span.epoch, version=span.version)
        return labels.current_weights

    def _label_starts(self, completion: Any) -> list[tuple[str, int]]:
        """Return where each label began: the last output carries it, as the state is gone by then."""
        if self.state is not None:
            starts: list[tuple[str, int]] = self.state.weight_version_starts
            return starts
        return [(span.version, span.start) for span in completion.weight_versions or ()]

    def _cut_tokens(
        self, tokens: Sequence[int], logprobs: Sequence[float] | None
    ) -> tuple[int, OutputEnding | None]:
        """Return how many tokens count, and why the output ends there, if our checks end it."""
        for index, token in enumerate(tokens):
            if logprobs is not None and not math.isfinite(logprobs[index]):
                return index, NOT_FINITE_ENDING
            if self.stops is None:
                continue
            verdict = self.stops.check_token(token, self.produced + index + 1)
            if verdict is not None:
                return index + 1, (*verdict, None)
        return len(tokens), None

    def _vllm_ending(self, completion: Any) -> OutputEnding | None:
        match completion.finish_reason:
            case None:
                return None
            case "stop":
                return StopReason.STOP, StopMatch(token_id=completion.stop_reason), None
            case "length":
                return StopReason.LENGTH, None, None
            case _:
                return StopReason.ABORTED, None, self.aborting or AbortReason.ENGINE

    def make_aborted_delta(self, reason: AbortReason) -> EngineDelta:
        """Return the last delta of an output that vLLM does not have."""
        self.ended = True
        return EngineDelta.of_abort(self.request, reason, self._queued_seconds())


def split_logprobs(
    found: Any, count: int, request: EngineRequest
) -> tuple[Sequence[float] | None, TopTokens | None]:
    """Return the logprobs of `count` sampled tokens, and the most likely tokens with each, as far as requested.

    `found`: vLLM's flat lists, in which each position begins with the sampled token; None without tokens.
    """
    if request.logprobs is None:
        return None, None
    if not count:
        return [], None
    if not request.top_logprobs:
        return found.logprobs, None
    top = TopTokens(request.top_logprobs)
    for start, end in zip(found.start_indices, found.end_indices, strict=True):
        likeliest = [*range(start + 1, end)]
        if end - start == request.top_logprobs:
            # Where vLLM joins outputs for a slow reader, no token stays in a row twice: a sampled one that is among
            # the most likely has only its first place, with its rank.
            likeliest = sorted(range(start, end), key=found.ranks.__getitem__)
        top.append_row(
            [found.token_ids[at] for at in likeliest], [found.logprobs[at] for at in likeliest]
        )
    return [found.logprobs[start] for start in found.start_indices], top


class PromptTensors:
    """What vLLM's core sent: for positions 1 and later, the prompt's own token, then the most likely ones.

    vLLM would make Python objects of every number in the worker's event loop: of millions for a long prompt, which takes
    seconds. token_ids, logprobs: [P - 1, 1 + k].
    """

    def __init__(self, token_ids: Any, logprobs: Any) -> None:
        self._token_ids, self._logprobs = token_ids, logprobs

    def take_scores(self, start: int, end: int) -> tuple[list[float], TopTokens | None]:
        """Return the logprobs of positions [start, end) with 0 < start, and the most likely tokens there."""
        values, ids = self._logprobs[start - 1 : end - 1], self._token_ids[start - 1 : end - 1]
        width = values.shape[1] - 1
        if not width:
            return values[:, 0].tolist(), None
        top = TopTokens(width)
        top.token_ids.frombytes(ids[:, 1:].int().contiguous().numpy().tobytes())
        top.logprobs.frombytes(values[:, 1:].float().contiguous().numpy().tobytes())
        return values[:, 0].tolist(), top


def keep_prompt_tensors() -> None:
    """Have vLLM hand over the scores of prompts as `PromptTensors`."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    def keep(processor: Any, tensors: Sequence[Any]) -> None:
        processor.prompt_logprobs = PromptTensors(tensors[0], tensors[1])

    LogprobsProcessor._update_prompt_logprobs = keep


def read_scores(
    request: EngineRequest,
    tensors: PromptTensors | None,
    weights: WeightsId,
    hidden: Collection[int] = (),
) -> PromptScores:
    """Return the scores that a request asks for, of no token in `hidden`; a prompt of one token has no tensors."""
    assert request.scored is not None
    start, end = request.scored
    first = max(1, start)
    values: list[float] = []
    top = None
    if end > first:
        assert tensors is not None, "vLLM scored no prompt"
        values, top = tensors.take_scores(first, end)
    found = PromptScores.from_computed(start, values, top, weights, request.top_logprobs)
    return found.without_tokens(request.token_ids, hidden)
