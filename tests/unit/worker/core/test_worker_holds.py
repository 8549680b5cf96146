from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollout_worker.core.holds import COMMIT_HOLDER, Holds, HoldTarget, SleepLevel, WantedState
from rollout_worker.schemas import MemoryTag, WeightsId

ALL: frozenset[MemoryTag] = frozenset({"weights", "kv_cache"})
HOLDERS = st.sampled_from(["operator", "trainer", "anonymous"])
TAGS = st.sets(st.sampled_from(sorted(ALL)), min_size=1).map(frozenset)


def test_a_commit_shows_as_a_hold_of_its_own() -> None:
    holds = Holds()
    holds.committing = WeightsId(epoch=1, version=2)
    assert [h.holder for h in holds.list_holds(0)] == [COMMIT_HOLDER]
    assert holds.merged_target(0).want is WantedState.ACTIVE, (
        "new requests wait, they are not refused"
    )


class HoldsMachine(RuleBasedStateMachine):
    """Against a plain model: holder -> (want, expiry, tags, level)."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = Holds()
        self.now = 0.0
        self.model: dict[str, tuple[WantedState, float, frozenset[MemoryTag], int]] = {}
        self.waiting: set[str] = set()
        """Who woke weights without their values and has called nothing since."""

    @rule(holder=HOLDERS, ttl=st.one_of(st.just(inf), st.integers(1, 20)))
    def pause(self, holder: str, ttl: float) -> None:
        self.holds.hold_paused(holder, self.now + ttl)
        self.waiting.discard(holder)
        self.model[holder] = (WantedState.PAUSED, self.now + ttl, frozenset(), 1)

    @rule(holder=HOLDERS, level=st.sampled_from([1, 2]), tags=TAGS)
    def sleep(self, holder: str, level: SleepLevel, tags: frozenset[MemoryTag]) -> None:
        self.holds.hold_asleep(holder, level, tags)
        self.waiting.discard(holder)
        former = self.model.get(holder)
        had = former[2] if former and former[0] is WantedState.ASLEEP else frozenset()
        deep = max(level, former[3]) if former and former[0] is WantedState.ASLEEP else level
        self.model[holder] = (WantedState.ASLEEP, inf, tags | had, deep)

    @rule(holder=HOLDERS)
    def release(self, holder: str) -> None:
        self.holds.release_hold(holder)
        self.waiting.discard(holder)
        self.model.pop(holder, None)

    @rule(holder=HOLDERS, tags=TAGS, load=st.booleans())
    def wake(self, holder: str, tags: frozenset[MemoryTag], load: bool) -> None:
        self.holds.release_tags(holder, tags, load=load)
        held = self.model.get(holder)
        if held and held[0] is WantedState.ASLEEP:
            left = held[2] - tags
            self.waiting.discard(holder)
            if left or not load:
                self.model[holder] = (*held[:2], left, held[3])
                self.waiting |= set() if load else {holder}
            else:
                del self.model[holder]

    @rule()
    def committed(self) -> None:
        self.holds.note_committed()
        for holder in self.waiting & set(self.model):
            if not self.model[holder][2]:
                del self.model[holder]
        self.waiting.clear()

    @rule(lending=st.booleans())
    def lend(self, lending: bool) -> None:
        self.holds.lending = lending

    @rule(seconds=st.integers(1, 10))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        gone = sorted(h for h, held in self.model.items() if held[1] <= self.now)
        assert sorted(self.holds.expire_holds(self.now)) == gone
        for holder in gone:
            del self.model[holder]

    @invariant()
    def agrees(self) -> None:
        target = self.holds.merged_target(self.now)
        assert target.want == max((h[0] for h in self.model.values()), default=WantedState.ACTIVE)
        lent = self.holds.lending and target.want is WantedState.ASLEEP
        released = frozenset().union(*(h[2] for h in self.model.values()))
        assert target.released == released - ({"weights"} if lent else set())
        assert (target.want is WantedState.ASLEEP) or not target.released
        assert target.released or target.want is not WantedState.ASLEEP or not target.load
        assert target.load is (not self.waiting and not lent)
        assert target.level == max((h[3] for h in self.model.values()), default=1)
        assert [h.holder for h in self.holds.list_holds(self.now)] == sorted(self.model)
        for holder in ("operator", "trainer", "anonymous"):
            assert self.holds.other_holders(holder, self.now) == sorted(set(self.model) - {holder})


TestHoldsMachine = HoldsMachine.TestCase
TestHoldsMachine.settings = settings(max_examples=60, stateful_step_count=25)


def test_the_first_of_several_to_expire_is_told() -> None:
    holds = Holds()
    holds.hold_paused("a", expires=30)
    holds.hold_paused("b", expires=10)
    holds.hold_asleep("c", 1, ALL)
    assert holds.next_expiry() == 10
    assert holds.next_expiry(9.9) == 10
    assert holds.next_expiry(10) == 30, "one that has expired stays until it is dropped"
    assert holds.next_expiry(30) == inf


def test_a_hold_ends_at_the_moment_of_its_expiry() -> None:
    holds = Holds()
    holds.hold_paused("a", expires=10)
    holds.hold_asleep("b", 1, ALL)
    wants = [holds.want_of(holder, 9) for holder in "abc"]
    assert wants == [WantedState.PAUSED, WantedState.ASLEEP, WantedState.ACTIVE]
    shown = [(h.holder, h.state, h.ttl) for h in holds.list_holds(4)]
    assert shown == [("a", "Paused", 6), ("b", "Asleep", None)]
    assert holds.other_holders("b", 9) == ["a"]
    assert holds.want_of("a", 10) is WantedState.ACTIVE
    assert [h.holder for h in holds.list_holds(10)] == ["b"]
    assert holds.other_holders("b", 10) == []
    holds.release_hold("b")
    assert holds.merged_target(9.9) == HoldTarget(WantedState.PAUSED)
    assert holds.merged_target(10) == HoldTarget(WantedState.ACTIVE)
    assert holds.expire_holds(10) == ["a"]
