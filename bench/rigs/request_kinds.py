"""Kinds of requests that our worker and an engine's own server both understand, and what each takes."""

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

    `theirs` is merged into the body, and into its objects one level below.
    """

    name: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]


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
    ),
    "sglang": (
        RequestKind("plain", {}, {}),
        RequestKind(
            f"top {TOP} of each position", {"top_logprobs": TOP}, {"top_logprobs_num": TOP}
        ),
        RequestKind("scored prompt", {"prompt_logprobs": True}, {"logprob_start_len": 0}),
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
        for kind in KINDS_OF[contenders.ENGINE]:
            sides = [
                _asking(live, more)
                for live, more in zip(both, (kind.ours, kind.theirs), strict=True)
            ]
            load = replace(PLAIN_LOAD, label=kind.name)
            figures += _figures(kind.name, *take_turns(load, sides, options))
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


def _figures(kind: str, ours: Sequence[Took], theirs: Sequence[Took]) -> list[Figure]:
    latency, their_latency = ([took.latency for took in some] for some in (ours, theirs))
    cpu, their_cpu = ([took.cpu for took in some] for some in (ours, theirs))
    goal = Goal(GOAL_RATIO * median(their_latency))
    server = "its own server"
    return [
        figure(
            f"{kind}: latency", latency, "ms", baseline=their_latency, against=server, goal=goal
        ),
        figure(f"{kind}: CPU per request", cpu, "ms", baseline=their_cpu, against=server),
    ]
