"""One output on its way through the child: what is asked, what came back, by which weights.

The child knows requests by numbers of fixed length (`rid`): SGLang aborts every request whose id begins
with the given one, so an abort by a client's own id could end others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from math import isfinite
from typing import TYPE_CHECKING, Any

from rollout_common.wire import AbortReason, StopReason, WeightsId
from rollout_worker.engine import EngineDelta, EngineRequest
from rollout_worker.engines.picture_model import banned_tokens, place_pictures
from rollout_worker.engines.request_checks import StopChecker, stop_ids
from rollout_worker.engines.sampling.asks import sampling_asks
from rollout_worker.engines.weight_versions import WeightsChange, spans_within
from rollout_worker.replay_records import ExpertRoutes, TokenMasks
from rollout_worker.token_scores import PromptScores

from .sglang_records import (
    pack_records,
    pack_top,
    score_fields,
    unpack_masks,
    unpack_prompt,
    unpack_routes,
    unpack_top,
)

if TYPE_CHECKING:
    from .model import SglangModel

ABORTED_TYPE = "abort"
"""The type of SGLang's reason for requests that it ended before their end."""


@dataclass(slots=True, eq=False)
class SglangStream:
    """A request from its arrival to its last delta; `changes`: the weights that made its tokens."""

    request: EngineRequest
    arrival: int
    model: SglangModel
    stop: StopChecker
    deltas: asyncio.Queue[EngineDelta | Exception] = field(default_factory=asyncio.Queue)
    rid: str | None = None
    produced: int = 0
    done: bool = False
    changes: list[WeightsChange] = field(default_factory=list)
    entered: float = field(default_factory=time.monotonic)
    queued: float = 0.0

    def begin_request(self, rid: str, weights: WeightsId, resets: int) -> dict[str, Any]:
        """Return the child's request; `weights` make the output from the first token on.

        `resets`: how often prefixes were forgotten before. `custom_params` is for our sampler (`batch_rows.SampledRow`).
        """
        self.rid = rid
        self.queued = time.monotonic() - self.entered
        self.changes = [(0, weights, False)]
        request, pictures = self.request, self.model.pictures
        placed = () if pictures is None else place_pictures(request, pictures)
        sampling = request.sampling
        stops = stop_ids(sampling, self.model.eos_token_ids)
        asks = sampling_asks(request, stops, banned_tokens(pictures))
        if request.routed_from is not None:
            asks["routes"] = request.routed_from
        if not (request.streamed or sampling.stop):  # stop strings are found here, token by token
            asks["unread"] = True
        return {
            "rid": rid,
            "input_ids": list(request.token_ids),
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": sampling.max_tokens,
                "ignore_eos": True,  # EOS ids are among the stop ids
                "stop_token_ids": sorted(stops),
                "custom_params": asks,
                **({} if request.grammar is None else {"ebnf": request.grammar.compiled}),
            },
            "return_logprob": request.logprobs is not None,
            **score_fields(request),
            "pictures": [(each.picture.ref, each.offset, each.length) for each in placed],
            "priority": request.priority,
            # A prefix is never shared between different weights, or over a reset of the cache.
            "extra_key": f"{weights.epoch}.{weights.version}.{resets}:{request.cache_salt or ''}",
        }

    def switch_weights(self, at: int, weights: WeightsId, stale: bool) -> None:
        """Note that tokens from index `at` on are made by other weights."""
        self.changes = [change for change in self.changes if change[0] < at]
        self.changes.append((at, weights, stale))

    @property
    def has_stale_kv(self) -> bool:
        """Whether KV of older weights is in use."""
        return bool(self.changes) and self.changes[-1][2]

    def take_tokens(
        self, ids: Sequence[int], logprobs: Sequence[float] | None, about: dict[str, Any]
    ) -> bool:
        """Pass new tokens on; return whether the child goes on although the output has ended."""
        if self.produced == 0:
            self.queued += about["queued"] or 0.0
        prompt = self._take_prompt(about)
        if self.request.sampling.max_tokens == 0:
            ids = ()
        verdict, used, abort, finish = None, 0, None, about["finish"]
        for used, token in enumerate(ids, 1):
            verdict = self.stop.check_token(token, self.produced + used)
            if verdict is not None:
                break
        reason, match = verdict or (None, None)
        if finish is not None and reason is None:
            reason, abort = StopReason.ABORTED, AbortReason.ENGINE
            if self.request.sampling.max_tokens == 0 and finish["type"] != ABORTED_TYPE:
                reason, abort = StopReason.LENGTH, None
        used, bad = self._cut_tokens((logprobs or ())[:used], used)
        if prompt is not None and not prompt.are_finite:
            bad, prompt, used = prompt.weights, None, 0
        if bad is not None:
            reason, match, abort = StopReason.ABORTED, None, AbortReason.ENGINE
        self.done = reason is not None
        start, self.produced = self.produced, self.produced + used
        top = None
        if self.request.top_logprobs and ids:
            top = unpack_top(about["top"]).slice_rows(0, used)
        masks, routes = self._take_records(about, used)
        self.deltas.put_nowait(
            EngineDelta(
                token_ids=tuple(ids[:used]),
                logprobs=None if self.request.logprobs is None else tuple((logprobs or ())[:used]),
                spans=spans_within(self.changes, start, self.produced),
                stop_reason=reason,
                stop_match=match,
                abort_reason=abort,
                not_finite=bad,
                cached_tokens=about["cached"],
                preemptions=about["retractions"],
                queued_seconds=self.queued,
                top=top,
                prompt=prompt,
                routes=routes,
                masks=masks,
            )
        )
        return self.done and finish is None

    def _cut_tokens(self, logprobs: Sequence[float], used: int) -> tuple[int, WeightsId | None]:
        """Return how many of `used` tokens count, and the weights whose logprob is not finite, if one is not."""
        for at, value in enumerate(logprobs):
            if not isfinite(value):
                [span] = spans_within(self.changes, self.produced + at, self.produced + at + 1)
                return at, WeightsId(epoch=span.epoch, version=span.version)
        return used, None

    def _take_records(
        self, about: dict[str, Any], used: int
    ) -> tuple[TokenMasks | None, ExpertRoutes | None]:
        """Return the records of the last `used` tokens."""
        masks = routes = None
        if used and self.request.masks:
            masks = unpack_masks(about["masks"][:used], self.model.vocab_size)
        if used and self.request.routed_from is not None and self.model.experts is not None:
            end = len(self.request.token_ids) - 1 + self.produced
            start = end - used if self.produced > used else self.request.routed_from
            routes = unpack_routes(about["routes"][:used], start, end, self.model.experts)
        return masks, routes

    def _take_prompt(self, about: dict[str, Any]) -> PromptScores | None:
        if "prompt" not in about or self.request.scored is None:
            return None
        found = unpack_prompt(about["prompt"], self.request.scored[0], self.changes[0][1])
        return found.without_tokens(self.request.token_ids, banned_tokens(self.model.pictures))

    def end_output(self, reason: AbortReason) -> None:
        """End the output with what it has."""
        if not self.done:
            self.done = True
            self.deltas.put_nowait(EngineDelta.of_abort(self.request, reason, self.queued))

    def fail_output(self, error: Exception) -> None:
        """End the output with an error that its reader raises."""
        if not self.done:
            self.done = True
            self.deltas.put_nowait(error)


def to_child_tokens(rid: str, output: dict[str, Any]) -> list[Any]:
    """Return `[rid, ids, logprobs or None, about]` of what SGLang made, as `child_connection` describes it."""
    meta = output["meta_info"]
    finish = meta["finish_reason"]
    if finish is not None and (status := finish.get("status_code")):
        # A bad request, or a grammar that grew too large, concerns this request alone, other errors the engine.
        alone = status == HTTPStatus.BAD_REQUEST or str(finish.get("message")).startswith(
            "Grammar "
        )
        kind = ValueError if alone else RuntimeError
        return [rid, [], None, {"error": f"{kind.__name__}: {finish.get('message')}"}]
    about = {
        "finish": finish,
        "cached": meta.get("cached_tokens", 0),
        "retractions": meta.get("num_retractions", 0),
        "queued": meta.get("queue_time"),
    }
    # For a request aborted in the queue, SGLang repeats its last token.
    ids = output["output_ids"] if "cached_tokens" in meta else []
    found = meta.get("output_token_logprobs")
    # SGLang may send more logprobs than ids: the last ones are those of the ids.
    logprobs = None if found is None else [entry[0] for entry in found[len(found) - len(ids) :]]
    if ids and meta.get("output_top_logprobs"):
        about["top"] = pack_top(meta["output_top_logprobs"][-len(ids) :])
    about |= pack_records(meta, len(ids))
    return [rid, ids, logprobs, about]
