"""What may go wrong at one act of an operator, or with all that it reads from there on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from tests.support.faults.faulty_operator import FaultyOperator
from tests.support.faults.memory_api import status_body
from tests.support.faults.memory_wire import Act
from tests.support.faults.scenes import (
    LATE_END_SECONDS,
    Accident,
    Scene,
    Story,
    at_rest,
    play,
    spec_key,
)

LEASE_SECONDS = 15.0
"""How long after the end of a leader's writes the next one leads."""
DOWN_SECONDS = 5.0
REASONS = {
    404: "NotFound",
    409: "Conflict",
    410: "Gone",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
}

Answer = tuple[int, bytes]


async def never() -> Answer:
    """Wait for ever: whoever waits for the answer gives up, or is gone."""
    await asyncio.Event().wait()
    raise AssertionError


async def kill(scene: Scene, operator: FaultyOperator, what: str, act: Act) -> Answer:
    """The act takes effect, and the process is gone."""
    operator.do(what, act)
    operator.gone.set()
    scene.succeed(1.0)
    return await never()


def refuse(code: int) -> Accident:
    async def happens(scene: Scene, operator: FaultyOperator, what: str, act: Act) -> Answer:
        return code, json.dumps(status_body(code, REASONS[code], "an accident")).encode()

    return happens


def cut_off(*, takes_effect: bool, told: bool) -> Accident:
    """Let no answer come: the connection breaks, if that is told, or nothing more is heard."""

    async def happens(scene: Scene, operator: FaultyOperator, what: str, act: Act) -> Answer:
        if takes_effect:
            operator.do(what, act)
        if told:
            raise ConnectionResetError("reset by peer")
        return await never()

    return happens


async def freeze(scene: Scene, operator: FaultyOperator, what: str, act: Act) -> Answer:
    """The process stands still with this under way; another one leads, and then it goes on."""
    operator.gone.set()
    operator.late.append((what, act))
    scene.late.append(operator)
    scene.succeed(LEASE_SECONDS)
    return await never()


async def stall(scene: Scene, operator: FaultyOperator, what: str, act: Act) -> Answer:
    """All open watches bring nothing more, and stay open."""
    for watch in scene.server.watches:
        watch.stalled = True
    return operator.do(what, act)


async def expire(scene: Scene, operator: FaultyOperator, what: str, act: Act) -> Answer:
    """A hundred times no watch can begin, because its version is too old; meanwhile somebody deletes a pod."""
    answer = operator.do(what, act)
    scene.server.refused_watches = 100
    scene.server.end_watches()
    scene.delete_a_pod()
    return answer


async def cut_lists(scene: Scene, operator: FaultyOperator, what: str, act: Act) -> Answer:
    """The next lists end in the middle."""
    scene.server.cut_lists = 5
    scene.server.end_watches()
    return operator.do(what, act)


async def silence_bookmarks(scene: Scene, operator: FaultyOperator, what: str, act: Act) -> Answer:
    """No watch gets a bookmark any more."""
    scene.server.bookmarks = False
    return operator.do(what, act)


async def restart(scene: Scene, operator: FaultyOperator, what: str, act: Act) -> Answer:
    """The API server ends after this and starts again."""
    operator.do(what, act)
    scene.go_down(DOWN_SECONDS)
    raise ConnectionResetError("reset by peer")


async def keep(scene: Scene, operator: FaultyOperator, what: str, act: Act) -> Answer:
    """A snapshot of etcd is taken after this; at the end of the story it is restored."""
    answer = operator.do(what, act)
    scene.restorable = scene.api.snapshot()
    return answer


async def restore_soon(scene: Scene, operator: FaultyOperator, what: str, act: Act) -> Answer:
    """A snapshot of etcd is taken after this, and restored three seconds later."""
    answer, snapshot = operator.do(what, act), scene.api.snapshot()
    asyncio.get_running_loop().call_later(3.0, lambda: scene.restore(snapshot))
    return answer


async def set_clock(scene: Scene, operator: FaultyOperator, what: str, act: Act) -> Answer:
    """The operator's clock goes an hour forth, two back, and then right."""
    loop = asyncio.get_running_loop()
    scene.skew = 3600.0
    loop.call_later(10.0, lambda: scene.set_skew(-3600.0))
    loop.call_later(30.0, lambda: scene.set_skew(0.0))
    return operator.do(what, act)


LOST = ("no request", "no answer")

ACCIDENTS: Mapping[str, Mapping[str, Accident]] = {
    "killed": {"killed": kill},
    "answers": {str(code): refuse(code) for code in REASONS}
    | {
        "no request": cut_off(takes_effect=False, told=False),
        "no answer": cut_off(takes_effect=True, told=False),
        "reset before": cut_off(takes_effect=False, told=True),
        "reset after": cut_off(takes_effect=True, told=True),
    },
    "two leaders": {"frozen": freeze},
    "reading": {
        "stall": stall,
        "100 x 410": expire,
        "cut lists": cut_lists,
        "no bookmarks": silence_bookmarks,
    },
    "API server": {"restart": restart, "snapshot": keep, "snapshot soon": restore_soon},
    "clock": {"clock": set_clock},
}
"""By family and name."""


BY_NAME = {name: found for family in ACCIDENTS.values() for name, found in family.items()}


def play_story(
    story: Story, accidents: Mapping[int, str] | None = None
) -> tuple[list[str], list[str]]:
    """Play a story with accidents by the number of the act; return its acts and what the judge found."""
    base = None if story.before is None else at_rest(spec_key(story.before))
    plan = {at: BY_NAME[name] for at, name in (accidents or {}).items()}

    async def part() -> tuple[list[str], list[str]]:
        scene = Scene(base, plan)
        if len(plan) > 1 or set(LOST) & set((accidents or {}).values()):
            scene.patience = LATE_END_SECONDS
        try:
            await scene.play(story)
        finally:
            await scene.end()
        return scene.acts, scene.problems

    found: tuple[list[str], list[str]] = play(part)
    return found
