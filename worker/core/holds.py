"""Holds: the callers that keep a worker from generating, and for how long.

Each caller has at most one hold, Paused or Asleep. The most restrictive live hold decides the
state, so a caller's resume does not end another caller's pause. Pure: time is passed in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum
from math import inf
from typing import Literal

from rollout_common.wire import Hold, MemoryTag, WeightsId

COMMIT_HOLDER = "commit"
"""The holder shown for a running commit, which acts as a hold."""

SleepLevel = Literal[1, 2]
EVERYTHING: frozenset[MemoryTag] = frozenset({"weights", "kv_cache"})
"""What a sleep may release."""


class WantedState(IntEnum):
    """Effective states, from least to most restrictive."""

    ACTIVE = 0
    PAUSED = 1
    ASLEEP = 2


@dataclass(frozen=True, slots=True)
class HoldTarget:
    """What all live holds together ask for: `released` memory is freed at sleep `level`.

    `load`: weights that wake get their values at once; False while a caller waits for a commit instead.
    """

    want: WantedState
    released: frozenset[MemoryTag] = frozenset()
    level: SleepLevel = 1
    load: bool = True

    @property
    def is_all_released(self) -> bool:
        """Whether the holds want no memory of the engine."""
        return self.want is WantedState.ASLEEP and self.released.issuperset(EVERYTHING)


@dataclass(frozen=True, slots=True)
class _HolderTarget(HoldTarget):
    """What one caller asks for, until it expires."""

    expires: float = inf


class Holds:
    """The live holds of one worker, by holder."""

    def __init__(self) -> None:
        self._held: dict[str, _HolderTarget] = {}
        self.committing: WeightsId | None = None
        """Set while a commit runs; listed as a hold."""
        self.lending = False
        """Whether a trainer has lent weights to this worker, which sleeps: their memory stays awake until it wakes."""

    def hold_paused(self, holder: str, expires: float = inf) -> None:
        """Set the holder's hold to Paused until `expires`, replacing any earlier hold."""
        self._held[holder] = _HolderTarget(WantedState.PAUSED, expires=expires)

    def hold_asleep(self, holder: str, level: SleepLevel, tags: Collection[MemoryTag]) -> None:
        """Set the holder's hold to Asleep for these tags, adding to those it already holds."""
        former = self._held.get(holder)
        if former is not None and former.want is WantedState.ASLEEP:
            level = 2 if 2 in (level, former.level) else 1
            tags = former.released.union(tags)
        self._held[holder] = _HolderTarget(WantedState.ASLEEP, frozenset(tags), level)

    def release_hold(self, holder: str) -> None:
        """Drop the holder's hold, if it has one."""
        self._held.pop(holder, None)

    def release_tags(self, holder: str, tags: Collection[MemoryTag], *, load: bool = True) -> None:
        """Remove these tags from the holder's sleep; the hold ends with its last tag.

        Without `load` it goes on until `note_committed`, even without a tag.
        """
        held = self._held.get(holder)
        if held is None or held.want is not WantedState.ASLEEP:
            return
        left = held.released.difference(tags)
        if left or not load:
            self._held[holder] = replace(held, released=left, load=load)
        else:
            del self._held[holder]

    def note_committed(self) -> None:
        """End the holds that waited for a commit."""
        waited = {holder: held for holder, held in self._held.items() if not held.load}
        for holder, held in waited.items():
            if held.released:
                self._held[holder] = replace(held, load=True)
            else:
                del self._held[holder]

    def expire_holds(self, now: float) -> list[str]:
        """Drop expired holds and return their holders."""
        gone = [holder for holder, held in self._held.items() if held.expires <= now]
        for holder in gone:
            del self._held[holder]
        return gone

    def want_of(self, holder: str, now: float) -> WantedState:
        """The state that this holder asks for."""
        held = self._held.get(holder)
        return held.want if held is not None and held.expires > now else WantedState.ACTIVE

    def other_holders(self, holder: str, now: float) -> list[str]:
        """All other holders of live holds."""
        return sorted(h for h, held in self._held.items() if h != holder and held.expires > now)

    def merged_target(self, now: float) -> HoldTarget:
        """The most restrictive of all live holds."""
        live = [held for held in self._held.values() if held.expires > now]
        target = HoldTarget(
            want=max((held.want for held in live), default=WantedState.ACTIVE),
            released=frozenset().union(*(held.released for held in live)),
            level=max((held.level for held in live), default=1),
            load=all(held.load for held in live),
        )
        if self.lending and target.want is WantedState.ASLEEP:
            return replace(target, released=target.released - {"weights"}, load=False)
        return target

    def next_expiry(self, after: float = -inf) -> float:
        """The time at which the next hold expires, of those later than `after`; infinite if none does."""
        return min((h.expires for h in self._held.values() if h.expires > after), default=inf)

    def list_holds(self, now: float) -> tuple[Hold, ...]:
        """The live holds as `/v1/state` shows them."""
        holds = [
            Hold(
                holder=holder,
                state="Asleep" if held.want is WantedState.ASLEEP else "Paused",
                ttl=None if held.expires == inf else max(0.0, held.expires - now),
            )
            for holder, held in sorted(self._held.items())
            if held.expires > now
        ]
        if self.committing is not None:
            holds.append(Hold(holder=COMMIT_HOLDER, state="Paused"))
        return tuple(holds)
