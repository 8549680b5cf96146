"""Which member gets a request. Pure: no network, and the clock is passed in.

In this order, among the members that may get it:

1. in deterministic mode: the highest hash of (key, member), the same in every process;
2. the member that had the key before, if it is as fast as usual and would have at most
   `max_imbalance` requests more than the least loaded one, this one included (its prefix cache is
   warm, but that does not make up for a queue, or for every token at half the pace);
3. the least loaded, where a request on a replica that samples at half the usual pace counts
   double; of equals, the one that was chosen least recently. Beyond `MAX_SCANNED` members: of so many
   at random, which is nearly as good and whose cost does not grow.

After a failure or a refusal a member is excluded until a probe or a later answer says that it
serves: health comes from answers, and discovery only says which members exist. Requests in flight
are counted by URL as long as there are any, even while the member is gone.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from rollout_client.discovery.pool_members import Member

from .member_records import ANY_WEIGHTS, MemberRecord, WeightsBounds
from .settings import PACE_COMPARE_SECONDS, PACE_MEMORY_SECONDS

MAX_SCANNED = 64
"""How many members are compared for a request."""

STICKY_KEYS = 100_000
SLOW_FACTOR = 1.5
"""Up to this multiple of the median pace a member counts as fast: paces differ with the batch."""

MAX_SLOWNESS = 10.0
"""A slower member counts as this slow: it still gets some requests, by which its pace is measured."""

PACE_SHARE = 0.2
"""Weight of the newest measurement of a member's pace."""

MAX_IMBALANCE = 8
MAX_REASONS = 8
"""Members whose reasons are listed in one sentence."""


@dataclass(kw_only=True, eq=False, repr=False)
class LoadBalancer:
    """Chooses the member that gets a request. `PoolOptions` describes the first two fields."""

    max_imbalance: int = MAX_IMBALANCE
    deterministic: bool = False
    sticky_keys: int = STICKY_KEYS
    """Keys whose member is remembered; the least recently used key is forgotten first."""
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_imbalance < 0:
            raise ValueError("max_imbalance must be 0 or more")
        self._last_url: OrderedDict[str, str] = OrderedDict()
        """By key: the member that got its last request."""
        self._records: dict[str, MemberRecord] = {}
        self._listed: list[MemberRecord] = []
        """The records once more, to draw from; empty after a change."""
        self._turn = 0
        self._compared_at = -math.inf
        self._random = random.Random(self.seed)

    # Members.

    @property
    def records(self) -> Mapping[str, MemberRecord]:
        """By URL: all members, also one that is gone, as long as requests run on it."""
        return self._records

    def present_members(self) -> list[Member]:
        """Members that are present, in discovery's order."""
        return [record.member for record in self._present_records()]

    def set_members(self, members: Sequence[Member], now: float) -> None:
        """Replace the members by those that discovery found."""
        wanted = {member.url: member for member in members}
        for url, record in list(self._records.items()):
            if url not in wanted:
                record.present = False
                self._forget_if_done(url)
        for url, member in wanted.items():
            known = self._records.get(url)
            # Under another name it is another pod with the same address.
            if known is None or not known.present or known.member.name != member.name:
                self._add_member(member, known, now)
                continue
            if member.ready and not known.member.ready:
                known.probe_at = now
                known.active = None  # a pod leaves its Service to catch up with the others
            known.member = member

    def _add_member(self, member: Member, gone: MemberRecord | None, now: float) -> None:
        """Start a new record of a member; requests that ran on it before it left still count."""
        in_flight = gone.in_flight if gone else 0
        record = MemberRecord(member, in_flight=in_flight, chosen=self._turn)
        if not member.proven:
            record.excluded, record.probe_at = "not asked yet", now
        self._records[member.url] = record
        self._listed.clear()

    def _forget_if_done(self, url: str) -> None:
        record = self._records.get(url)
        if record is not None and not record.present and record.in_flight == 0:
            del self._records[url]
            self._listed.clear()

    # Choosing.

    def choose_member(
        self,
        key: str | None,
        now: float,
        bounds: WeightsBounds = ANY_WEIGHTS,
        avoid: Collection[str] = (),
    ) -> Member | None:
        """Return the member for a request and count it there; None: no member may get it now.

        Args:
            key: The conversation's (or group's); None: any member will do.
            now: Monotonic seconds.
            bounds: Weights that the request takes.
            avoid: URLs of members that get it only if no other may.
        """

        def is_allowed(record: MemberRecord) -> bool:
            if not record.is_usable(now):
                return False
            admitted = bounds.admits(record.active)
            record.passed_over |= not (admitted or bounds.is_passed_by(record.active))
            return admitted

        usable = self._find_usable(is_allowed, avoid)
        if not usable:
            return None
        if key is None:
            record = self._least_loaded(usable)
        else:
            last = self._records.get(self._last_url.get(key, ""))
            if last is not None and not (is_allowed(last) and last.member.url not in avoid):
                last = None
            record = self._member_for_key(key, last, usable)
        self._turn += 1
        record.chosen = self._turn
        record.in_flight += 1
        return record.member

    def _find_usable(
        self, is_allowed: Callable[[MemberRecord], bool], avoid: Collection[str]
    ) -> list[MemberRecord]:
        """Return members that may get the request: some of many, and those to avoid only if nobody else may."""
        every: Collection[MemberRecord] = self._records.values()
        few = len(every) <= MAX_SCANNED or self.deterministic
        if not few:
            self._listed = self._listed or list(every)
            some = self._random.sample(self._listed, MAX_SCANNED)
            found = [r for r in some if is_allowed(r) and r.member.url not in avoid]
            if found:
                return found
        allowed = [record for record in every if is_allowed(record)]
        return [record for record in allowed if record.member.url not in avoid] or allowed

    def _member_for_key(
        self, key: str, last: MemberRecord | None, usable: Sequence[MemberRecord]
    ) -> MemberRecord:
        """Return the member for a conversation: `last` is the one that it had, if that may get the request."""
        if self.deterministic:
            return max(usable, key=lambda record: _rendezvous_hash(key, record.member.url))
        record = self._least_loaded(usable)
        if last is not None and self._may_stay(last, usable):
            record = last
        self._last_url[key] = record.member.url
        self._last_url.move_to_end(key)
        if len(self._last_url) > self.sticky_keys:
            self._last_url.popitem(last=False)
        return record

    def _may_stay(self, record: MemberRecord, usable: Sequence[MemberRecord]) -> bool:
        """Whether a conversation's member is as fast as usual, and not too loaded."""
        if record.slowness > 1:
            return False
        least = min(each.weighted_load + (each is record) for each in (record, *usable))
        return record.weighted_load + 1 <= least + self.max_imbalance

    def _least_loaded(self, usable: Sequence[MemberRecord]) -> MemberRecord:
        if self.deterministic:
            return min(usable, key=lambda record: record.member.url)
        # Compare the loads with the new request, not before it.
        return min(usable, key=lambda each: (each.weighted_load + each.slowness, each.chosen))

    def release_member(self, url: str) -> None:
        """Note that a request ended there."""
        record = self._records.get(url)
        if record is not None:
            record.in_flight = max(0, record.in_flight - 1)
            self._forget_if_done(url)

    # What answers report.

    def note_pace(self, url: str, seconds_per_token: float, now: float) -> None:
        """Note how fast it sampled, and compare all members again: many of them not at each request."""
        record = self._records[url]
        old = seconds_per_token if record.pace is None else record.pace
        record.pace, record.paced_at = old + PACE_SHARE * (seconds_per_token - old), now
        many = len(self._records) > MAX_SCANNED
        if not (many and now - self._compared_at < PACE_COMPARE_SECONDS):
            self._compared_at = now
            self._compare_paces(now)

    def _compare_paces(self, now: float) -> None:
        for each in self._records.values():
            if now - each.paced_at > PACE_MEMORY_SECONDS:
                each.pace = None
        paces = sorted(r.pace for r in self._records.values() if r.pace is not None)
        usual = paces[(len(paces) - 1) // 2]
        for each in self._records.values():
            times = (each.pace or usual) / usual if usual > 0 else 1.0
            each.slowness = min(MAX_SLOWNESS, times) if times > SLOW_FACTOR else 1.0

    # Messages.

    def all_beyond(self, bounds: WeightsBounds, *, serving: bool = False) -> bool:
        """Whether every present member is beyond the exact version asked for; `serving`: every one that needs no probe."""
        records = self._present_records()
        if serving:
            # A member whose exclusion ends by itself, since its queue is full, counts: it may have the version.
            records = [record for record in records if record.is_usable(math.inf)]
        return bool(records) and all(bounds.is_passed_by(record.active) for record in records)

    def exclusion_reasons(self, now: float, bounds: WeightsBounds = ANY_WEIGHTS) -> str:
        """Return in one sentence why no member gets the request."""
        each = [
            f"{record.member.name}: {record.unusable_reason(now, bounds) or 'serves'}"
            for record in self._present_records()
        ]
        more = f"; and {len(each) - MAX_REASONS} more" if len(each) > MAX_REASONS else ""
        return "; ".join(each[:MAX_REASONS]) + more

    def _present_records(self) -> list[MemberRecord]:
        return [record for record in self._records.values() if record.present]


def _rendezvous_hash(key: str, url: str) -> bytes:
    """Return a rendezvous hash: when a member goes, only its own keys move."""
    return blake2b(f"{key}\0{url}".encode(), digest_size=8).digest()
