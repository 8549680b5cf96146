from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollout_worker.core.holds import COMMIT, Holds, SleepLevel, Target, Want
from rollout_worker.schemas import MemoryTag, WeightsId

ALL: frozenset[MemoryTag] = frozenset({"weights", "kv_cache"})
HOLDERS = st.sampled_from(["operator", "trainer", "anonymous"])
TAGS = st.sets(st.sampled_from(sorted(ALL)), min_size=1).map(frozenset)


def test_nobody_holds_at_first() -> None:
    assert Holds().target(0) == Target(Want.ACTIVE)


def test_the_most_restrictive_hold_wins() -> None:
    holds = Holds()
    holds.pause("trainer")
    holds.sleep("operator", 1, ALL)
    assert holds.target(0) == Target(Want.ASLEEP, ALL)
    holds.wake("operator", ALL)
    assert holds.target(0) == Target(Want.PAUSED)
    holds.release("trainer")
    assert holds.target(0) == Target(Want.ACTIVE)


def test_release_drops_the_callers_hold_only() -> None:
    holds = Holds()
    holds.pause("trainer")
    holds.pause("operator")
    holds.release("trainer")
    assert holds.others("trainer", 0) == ["operator"]
    assert holds.target(0).want is Want.PAUSED


def test_a_pause_expires_by_itself() -> None:
    holds = Holds()
    holds.pause("trainer", expires=10)
    assert holds.listing(4)[0].ttl == 6
    assert holds.next_expiry() == 10
    assert holds.target(9.9).want is Want.PAUSED
    assert holds.target(10).want is Want.ACTIVE
    assert holds.expire(10) == ["trainer"]
    assert holds.next_expiry() == inf


def test_pausing_again_renews() -> None:
    holds = Holds()
    holds.pause("trainer", expires=10)
    holds.pause("trainer")
    assert holds.target(99).want is Want.PAUSED


def test_staged_waking_keeps_the_hold_until_the_last_tag() -> None:
    holds = Holds()
    holds.sleep("trainer", 2, ALL)
    holds.wake("trainer", ["weights"])
    assert holds.target(0) == Target(Want.ASLEEP, frozenset({"kv_cache"}), 2)
    holds.wake("trainer", ["kv_cache"])
    assert holds.target(0) == Target(Want.ACTIVE)


def test_sleeping_again_adds_tags_and_the_deeper_level_stays() -> None:
    holds = Holds()
    holds.sleep("trainer", 2, ["kv_cache"])
    holds.sleep("trainer", 1, ["weights"])
    assert holds.target(0) == Target(Want.ASLEEP, ALL, 2)


def test_pausing_replaces_the_callers_sleep() -> None:
    holds = Holds()
    holds.sleep("operator", 1, ALL)
    holds.pause("operator")
    assert holds.target(0) == Target(Want.PAUSED)


def test_waking_leaves_a_pause_alone() -> None:
    holds = Holds()
    holds.pause("operator")
    holds.wake("operator", ALL)
    assert holds.target(0) == Target(Want.PAUSED)


def test_a_commit_shows_as_a_hold_of_its_own() -> None:
    holds = Holds()
    holds.committing = WeightsId(epoch=1, version=2)
    assert [h.holder for h in holds.listing(0)] == [COMMIT]
    assert holds.target(0).want is Want.ACTIVE, "new requests wait, they are not refused"


class HoldsMachine(RuleBasedStateMachine):
    """Against a plain model: holder -> (want, expiry, tags, level)."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds()
        self.now = 0.0
        self.model: dict[str, tuple[Want, float, frozenset[MemoryTag], int]] = {}
        self.waiting: set[str] = set()
        """Who woke weights without their values and has called nothing since."""

    @rule(holder=HOLDERS, ttl=st.one_of(st.just(inf), st.integers(1, 20)))
    def pause(self, holder: str, ttl: float) -> None:
        self.holds.pause(holder, self.now + ttl)
        self.waiting.discard(holder)
        self.model[holder] = (Want.PAUSED, self.now + ttl, frozenset(), 1)

    @rule(holder=HOLDERS, level=st.sampled_from([1, 2]), tags=TAGS)
    def sleep(self, holder: str, level: SleepLevel, tags: frozenset[MemoryTag]) -> None:
        self.holds.sleep(holder, level, tags)
        self.waiting.discard(holder)
        former = self.model.get(holder)
        had = former[2] if former and former[0] is Want.ASLEEP else frozenset()
        deep = max(level, former[3]) if former and former[0] is Want.ASLEEP else level
        self.model[holder] = (Want.ASLEEP, inf, tags | had, deep)

    @rule(holder=HOLDERS)
    def release(self, holder: str) -> None:
        self.holds.release(holder)
        self.waiting.discard(holder)
        self.model.pop(holder, None)

    @rule(holder=HOLDERS, tags=TAGS, load=st.booleans())
    def wake(self, holder: str, tags: frozenset[MemoryTag], load: bool) -> None:
        self.holds.wake(holder, tags, load=load)
        held = self.model.get(holder)
        if held and held[0] is Want.ASLEEP:
            left = held[2] - tags
            self.waiting.discard(holder)
            if left or not load:
                self.model[holder] = (*held[:2], left, held[3])
                self.waiting |= set() if load else {holder}
            else:
                del self.model[holder]

    @rule()
    def committed(self) -> None:
        self.holds.committed()
        for holder in self.waiting & set(self.model):
            if not self.model[holder][2]:
                del self.model[holder]
        self.waiting.clear()

    @rule(seconds=st.integers(1, 10))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        gone = sorted(h for h, held in self.model.items() if held[1] <= self.now)
        assert sorted(self.holds.expire(self.now)) == gone
        for holder in gone:
            del self.model[holder]

    @invariant()
    def agrees(self) -> None:
        target = self.holds.target(self.now)
        assert target.want == max((h[0] for h in self.model.values()), default=Want.ACTIVE)
        assert target.released == frozenset().union(*(h[2] for h in self.model.values()))
        assert (target.want is Want.ASLEEP) or not target.released
        assert target.released or target.want is not Want.ASLEEP or not target.load
        assert target.load is (not self.waiting)
        assert [h.holder for h in self.holds.listing(self.now)] == sorted(self.model)
        for holder in ("operator", "trainer", "anonymous"):
            assert self.holds.others(holder, self.now) == sorted(set(self.model) - {holder})


TestHoldsMachine = HoldsMachine.TestCase
TestHoldsMachine.settings = settings(max_examples=60, stateful_step_count=25)


@pytest.mark.parametrize("level", [1, 2])
def test_the_level_is_that_of_the_deepest_sleeper(level: SleepLevel) -> None:
    holds = Holds()
    holds.sleep("a", 1, ["kv_cache"])
    holds.sleep("b", level, ["weights"])
    assert holds.target(0).level == level


def test_the_first_of_several_to_expire_is_told() -> None:
    holds = Holds()
    holds.pause("a", expires=30)
    holds.pause("b", expires=10)
    holds.sleep("c", 1, ALL)
    assert holds.next_expiry() == 10


def test_a_hold_ends_at_the_moment_of_its_expiry() -> None:
    holds = Holds()
    holds.pause("a", expires=10)
    holds.sleep("b", 1, ALL)
    assert (holds.of("a", 9), holds.of("b", 9), holds.of("c", 9)) == (
        *(Want.PAUSED, Want.ASLEEP),
        Want.ACTIVE,
    )
    assert [(h.holder, h.state) for h in holds.listing(9)] == [("a", "Paused"), ("b", "Asleep")]
    assert holds.others("b", 9) == ["a"]
    assert holds.of("a", 10) is Want.ACTIVE
    assert [h.holder for h in holds.listing(10)] == ["b"]
    assert holds.others("b", 10) == []
