"""Kinds of requests, and what each takes at our worker and, where it understands them, at the engine's own server."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.options import Options
from bench.reporting.figures import Figure, Goal, figure

from .models import TINY
from .servers import Live, Side, started
from .two_servers import PLAIN_LOAD, Contenders, Took, take_turns

GOAL_RATIO = 1.1
TOP = 20


@dataclass(frozen=True, slots=True)
class RequestKind:
    """A kind, and what it adds to the body of a plain request of each server.

    Both are merged into the body, and into its objects one level below. `theirs` None: its server, which has no tokenizer
    here, does not take it, and the kind is compared with our plain requests.
    """

    name: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any] | None = None


OURS_ALONE = (
    RequestKind("mask of each draw", {"return_sampling_mask": True, "sampling": {"top_k": 50}}),
)


KINDS_OF: Mapping[str, Sequence[RequestKind]] = {
    "vllm": (
        RequestKind("plain", {}, {}),
        RequestKind(
            f"top {TOP} of each position",
            {"top_logprobs": TOP},
            {"sampling_params": {"logprobs": TOP}},
        ),
        RequestKind(
            "scored prompt", {"prompt_logprobs": True}, {"sampling_params": {"prompt_logprobs": 0}}
        ),
        *OURS_ALONE,
    ),
    "sglang": (
        RequestKind("plain", {}, {}),
        RequestKind(
            f"top {TOP} of each position", {"top_logprobs": TOP}, {"top_logprobs_num": TOP}
        ),
        RequestKind("scored prompt", {"prompt_logprobs": True}, {"logprob_start_len": 0}),
        *OURS_ALONE,
    ),
}


def compare_kinds(contenders: Contenders, options: Options) -> list[Figure]:
    """Measure every kind at both servers, in turns."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        both = [
            stack.enter_context(
                started(
                    contenders.ENGINE,
                    side,
                    contenders.ENVIRON,
                    TINY.model(1),
                    "float32",
                    Path(name),
                )
            )
            for side in (contenders.OURS, contenders.THEIRS)
        ]
        plain: Sequence[Took] = ()
        for kind in KINDS_OF[contenders.ENGINE]:
            load = replace(PLAIN_LOAD, label=kind.name)
            asked = (kind.ours, kind.theirs) if kind.theirs is not None else (kind.ours,)
            sides = [_asking(live, more) for live, more in zip(both, asked, strict=False)]
            ours, *theirs = take_turns(load, sides, options)
            plain = plain or ours
            figures += _figures(kind.name, ours, theirs[0] if theirs else plain, alone=not theirs)
    return figures


def _asking(live: Live, more: Mapping[str, Any]) -> Live:
    """Return the server with requests of a kind."""
    plain: Side = live.side

    def body(prompt: list[int], length: int) -> Mapping[str, Any]:
        made = dict(plain.body(prompt, length))
        for key, value in more.items():
            inner = made.get(key)
            made[key] = {**inner, **value} if isinstance(inner, Mapping) else value
        return made

    return replace(live, side=replace(plain, body=body))


def _figures(
    kind: str, ours: Sequence[Took], theirs: Sequence[Took], *, alone: bool
) -> list[Figure]:
    latency, their_latency = ([took.latency for took in some] for some in (ours, theirs))
    cpu, their_cpu = ([took.cpu for took in some] for some in (ours, theirs))
    goal = None if alone else Goal(GOAL_RATIO * median(their_latency))
    against = "our plain requests" if alone else "its own server"
    return [
        figure(
            f"{kind}: latency", latency, "ms", baseline=their_latency, against=against, goal=goal
        ),
        figure(f"{kind}: CPU per request", cpu, "ms", baseline=their_cpu, against=against),
    ]
