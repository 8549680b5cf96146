"""What each kind of request takes at our worker and, where it understands it, at the engine's own server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.options import Options
from bench.reporting.figures import Figure, Goal, figure

from .request_kinds import KindsOfModel, More, kinds_of, merge_body
from .servers import Live, Side, started
from .two_servers import PLAIN_LOAD, Contenders, Took, take_turns

GOAL_RATIO = 1.1


def compare_kinds(contenders: Contenders, options: Options) -> list[Figure]:
    """Measure every kind at both servers, in turns; models with other flags have servers of their own."""
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        for some in kinds_of(contenders.ENGINE, home / "models"):
            figures += _compare_model(contenders, some, home, options)
    return figures


def _compare_model(
    contenders: Contenders, some: KindsOfModel, folder: Path, options: Options
) -> Iterator[Figure]:
    sides = (
        _with_flags(contenders.OURS, some.ours),
        _with_flags(contenders.THEIRS, some.theirs, some.dropped),
    )
    engine, environ = contenders.ENGINE, contenders.ENVIRON
    both_take_some = any(kind.theirs is not None for kind in some.kinds)
    with ExitStack() as stack:
        both = [
            stack.enter_context(started(engine, side, environ, some.model, "float32", folder))
            for side in sides[: 1 + both_take_some]
        ]
        if some.prepare is not None:
            some.prepare(both[0])
        plain: Sequence[Took] = ()
        for kind in some.kinds:
            load = replace(PLAIN_LOAD, label=kind.name)
            asked = (kind.ours, kind.theirs) if kind.theirs is not None else (kind.ours,)
            asking = [_asking(live, more) for live, more in zip(both, asked, strict=False)]
            ours, *theirs = take_turns(load, asking, options)
            plain = plain or ours
            yield from _figures(kind.name, ours, theirs[0] if theirs else plain, alone=not theirs)


def _with_flags(side: Side, added: Sequence[str], dropped: Sequence[str] = ()) -> Side:
    """Return the server with other flags on its command line."""

    def words(model: Path, dtype: str, port: int) -> Sequence[str]:
        own = side.words(model, dtype, port)
        return [*(word for word in own if word not in dropped), *added]

    return replace(side, words=words)


def _asking(live: Live, more: More) -> Live:
    """Return the server with requests of a kind."""
    plain = live.side.body
    side = replace(
        live.side, body=lambda prompt, length: merge_body(plain(prompt, length), more, prompt)
    )
    return replace(live, side=side)


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
