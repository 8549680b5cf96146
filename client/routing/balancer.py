"""Which member gets a request. Pure: no network, and the clock is passed in.

In this order, among the members that may get it:

1. deterministic mode: the highest hash of (key, member), the same in every process;
2. the member that had the key before, while it is no slower than usual and comes with this request
   to at most `max_imbalance` more than the least loaded one (its prefix cache is warm, but no cache
   is worth any queue, or every token at half the pace);
3. the least loaded, where a request on a replica that samples at half the usual pace counts
   double; of equals the one that was chosen least recently. Beyond `SCAN` members: the
   less loaded of two at random, whose tail is nearly as good and whose cost does not grow.

A member is out after a failure or a refusal until a probe or its own later answer says otherwise;
so health comes from answers, and discovery only says who exists. Counts of requests in flight are
kept by URL for as long as there are any, also while the member is gone.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from rollout_client.discovery.members import Member
from rollout_worker.schemas import WeightsId

SCAN = 64
"""Members up to which all are looked at."""

STICKY_KEYS = 100_000
SLOW = 1.5
"""Times the median pace below which a member counts as usual: paces differ with the batch."""

MOST_SLOW = 10.0
PACE_SECONDS = 60.0
PACE_SHARE = 0.2
"""Weight of the newest measurement of a member's pace."""

MAX_IMBALANCE = 8


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which weights a request takes, as the worker's admission reads the same fields."""

    epoch: int | None = None
    min_version: int | None = None
    exact_version: int | None = None

    def admits(self, active: WeightsId | None) -> bool:
        """Whether these weights will do; of unknown ones it is believed."""
        if active is None:
            return True
        epoch = active.epoch if self.epoch is None else self.epoch
        if self.exact_version is not None and active.as_tuple() != (epoch, self.exact_version):
            return False
        return active.as_tuple() >= (epoch, self.min_version or 0)

    def passed_by(self, active: WeightsId | None) -> bool:
        """Whether these weights are beyond the exact version: waiting is in vain."""
        if active is None or self.exact_version is None:
            return False
        epoch = active.epoch if self.epoch is None else self.epoch
        return active.as_tuple() > (epoch, self.exact_version)


ANY = Bounds()


@dataclass(slots=True, eq=False)
class Seat:
    """What is known of one member."""

    member: Member
    in_flight: int = 0
    present: bool = True
    """False: discovery has it no more; kept while requests run on it."""
    out: str = ""
    """Why it gets nothing, in words; empty: it may."""
    out_until: float | None = None
    """When it may get requests again without a probe; None: only after one."""
    failures: int = 0
    """Since it last answered well."""
    active: WeightsId | None = None
    pace: float | None = None
    """Seconds per sampled token, smoothed; None: not measured lately."""
    paced_at: float = 0.0
    slowness: float = 1.0
    """Its pace over the median one, 1 for whoever is near it."""
    chosen: int = 0
    probe_at: float = 0.0
    gone_at: float = field(default=0.0)

    @property
    def load(self) -> float:
        """Requests in flight, in requests of a usual member."""
        return self.in_flight * self.slowness

    def usable(self, now: float) -> bool:
        """Whether it may get requests."""
        if not (self.present and self.member.ready):
            return False
        if self.out and self.out_until is not None and now >= self.out_until:
            self.out, self.out_until = "", None
        return not self.out

    def why_not(self, now: float, bounds: Bounds = ANY) -> str:
        """Why it gets nothing now; empty if it may."""
        if not self.present:
            return "gone"
        if not self.member.ready:
            return "not ready"
        if not self.usable(now):
            return self.out
        return "" if bounds.admits(self.active) else f"has weights {self.active}"


class Balancer:
    """See the module.

    Args:
        max_imbalance: Requests that a sticky member may have above the least loaded one.
        deterministic: Choose by a stable hash of the key instead of by load.
        seed: Of the choice of two.
    """

    def __init__(
        self,
        *,
        max_imbalance: int = MAX_IMBALANCE,
        deterministic: bool = False,
        sticky_keys: int = STICKY_KEYS,
        seed: int | None = None,
    ) -> None:
        if max_imbalance < 0:
            raise ValueError("max_imbalance must be 0 or more")
        self._max_imbalance = max_imbalance
        self._deterministic = deterministic
        self._sticky_keys = sticky_keys
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._seats: dict[str, Seat] = {}
        self._turn = 0
        self._random = random.Random(seed)

    # Who is there.

    @property
    def seats(self) -> Mapping[str, Seat]:
        """All seats by URL, also of members that are gone while requests run on them."""
        return self._seats

    def members(self) -> list[Member]:
        """Present members in discovery's order."""
        return [seat.member for seat in self._seats.values() if seat.present]

    def set_members(self, members: Sequence[Member], now: float) -> None:
        """Take discovery's new set."""
        wanted = {member.url: member for member in members}
        for url, seat in list(self._seats.items()):
            if url not in wanted and seat.present:
                seat.present, seat.gone_at = False, now
            self._forget(url)
        for url, member in wanted.items():
            known = self._seats.get(url)
            if known is None or not known.present:
                self._add(member, known, now)
            else:
                if member.ready and not known.member.ready:
                    known.probe_at = now
                known.member = member

    def _add(self, member: Member, known: Seat | None, now: float) -> None:
        seat = Seat(member, in_flight=known.in_flight if known else 0, chosen=self._turn)
        if not member.proven:
            seat.out, seat.probe_at = "not asked yet", now
        self._seats[member.url] = seat

    def _forget(self, url: str) -> None:
        seat = self._seats.get(url)
        if seat is not None and not seat.present and seat.in_flight == 0:
            del self._seats[url]

    # Who gets it.

    def choose(
        self,
        key: str | None,
        now: float,
        bounds: Bounds = ANY,
        avoid: Collection[str] = (),
    ) -> Member | None:
        """Return the member for a request and count it there; None: nobody may get it now.

        Args:
            key: The conversation's (or group's); None: any member will do.
            now: Monotonic seconds.
            bounds: Weights that the request takes.
            avoid: URLs to leave out if others may get it.
        """
        usable = [s for s in self._seats.values() if s.usable(now) and bounds.admits(s.active)]
        others = [s for s in usable if s.member.url not in avoid] if avoid else usable
        usable = others or usable
        if not usable:
            return None
        seat = self._of_key(key, usable) if key is not None else self._least(usable)
        self._turn += 1
        seat.chosen = self._turn
        seat.in_flight += 1
        return seat.member

    def _of_key(self, key: str, usable: Sequence[Seat]) -> Seat:
        if self._deterministic:
            return max(usable, key=lambda seat: _weight(key, seat.member.url))
        seat = self._stuck(key, usable) or self._least(usable)
        self._sticky[key] = seat.member.url
        self._sticky.move_to_end(key)
        if len(self._sticky) > self._sticky_keys:
            self._sticky.popitem(last=False)
        return seat

    def _stuck(self, key: str, usable: Sequence[Seat]) -> Seat | None:
        seat = self._seats.get(self._sticky.get(key, ""))
        if seat is None or seat not in usable or seat.slowness > 1:
            return None
        least = min(each.load + (each is seat) for each in usable)
        return seat if seat.load + 1 <= least + self._max_imbalance else None

    def _least(self, usable: Sequence[Seat]) -> Seat:
        if self._deterministic:
            return min(usable, key=lambda seat: seat.member.url)
        if len(usable) > SCAN:
            usable = self._random.sample(usable, 2)
        # What counts is how long the new one would take: with it, not before it.
        return min(usable, key=lambda seat: (seat.load + seat.slowness, seat.chosen))

    def release(self, url: str) -> None:
        """A request ended there."""
        seat = self._seats.get(url)
        if seat is not None:
            seat.in_flight = max(0, seat.in_flight - 1)
            self._forget(url)

    # What answers say.

    def take_out(self, url: str, why: str, now: float, until: float | None = None) -> None:
        """Give it nothing more: until then, or (None) until a probe says that it serves."""
        seat = self._seats.get(url)
        if seat is None:
            return
        seat.failures += 1
        seat.out, seat.out_until, seat.probe_at = why, until, now

    def bring_back(self, url: str) -> None:
        """It answered that it serves."""
        seat = self._seats.get(url)
        if seat is not None:
            seat.out, seat.out_until, seat.failures = "", None, 0

    def saw_weights(self, url: str, active: WeightsId) -> None:
        """It said which weights are active there."""
        seat = self._seats.get(url)
        if seat is not None:
            seat.active = active

    def saw_pace(self, url: str, seconds_per_token: float, now: float) -> None:
        """It sampled at this pace."""
        seat = self._seats.get(url)
        if seat is None:
            return
        old = seconds_per_token if seat.pace is None else seat.pace
        seat.pace, seat.paced_at = old + PACE_SHARE * (seconds_per_token - old), now
        for each in self._seats.values():
            if now - each.paced_at > PACE_SECONDS:
                each.pace = None  # whoever was slow is tried again
        paces = sorted(s.pace for s in self._seats.values() if s.pace is not None)
        usual = paces[(len(paces) - 1) // 2]
        for each in self._seats.values():
            times = (each.pace or usual) / usual if usual > 0 else 1.0
            each.slowness = min(MOST_SLOW, times) if times > SLOW else 1.0

    # What to say when nobody can.

    def out_of_reach(self, bounds: Bounds) -> bool:
        """Whether every present member is beyond the exact version asked for."""
        present = [seat for seat in self._seats.values() if seat.present]
        return bool(present) and all(bounds.passed_by(seat.active) for seat in present)

    def reasons(self, now: float, bounds: Bounds = ANY) -> str:
        """One sentence of why nobody gets the request."""
        told = [
            f"{seat.member.name}: {seat.why_not(now, bounds) or 'serves'}"
            for seat in self._present()
        ]
        return "; ".join(told[:8]) + (f"; and {len(told) - 8} more" if len(told) > 8 else "")

    def _present(self) -> Iterator[Seat]:
        return (seat for seat in self._seats.values() if seat.present)


def _weight(key: str, url: str) -> bytes:
    """Rendezvous hash: when a member goes, only its own keys move."""
    return blake2b(f"{key}\0{url}".encode(), digest_size=8).digest()
