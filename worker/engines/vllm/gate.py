"""Who may enter vLLM: the queue in front of it, by priority and arrival.

vLLM gets no more outputs than it runs at once, so that what waits can wait for other weights,
and so that the worker knows which outputs run.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(order=True, slots=True)
class _Place:
    priority: int
    arrival: int
    name: str = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


class Gate:
    """Lets at most `limit` outputs in at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: list[_Place] = []
        self._inside: set[str] = set()
        self._open = True

    @property
    def inside(self) -> frozenset[str]:
        """Names of those that were let in and did not leave yet."""
        return frozenset(self._inside)

    async def enter(self, name: str, priority: int, arrival: int) -> None:
        """Wait for the turn; who is cancelled meanwhile has lost it."""
        place = _Place(priority, arrival, name, asyncio.get_running_loop().create_future())
        heapq.heappush(self._places, place)
        self._let_in()
        try:
            await place.turn
        except asyncio.CancelledError:
            self.leave([name])
            raise

    def leave(self, names: Collection[str]) -> None:
        """Make room."""
        self._inside.difference_update(names)
        self._let_in()

    def dismiss(self, name: str) -> None:
        """End somebody's waiting without letting them in."""
        for place in self._places:
            if place.name == name and not place.turn.done():
                place.turn.set_result(None)

    def shut(self) -> None:
        """Let nobody in any more."""
        self._open = False

    def open(self) -> None:
        """Let them in again."""
        self._open = True
        self._let_in()

    def _let_in(self) -> None:
        while self._places and self._places[0].turn.done():
            heapq.heappop(self._places)
        while self._open and self._places and len(self._inside) < self._limit:
            place = heapq.heappop(self._places)
            if not place.turn.done():
                self._inside.add(place.name)
                place.turn.set_result(None)
