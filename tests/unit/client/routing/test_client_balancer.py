"""Who gets a request: sticky within bounds, least in-flight, out after failures. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_client.discovery.pool_members import Member, static_members
from rollout_client.routing.balancer import MAX_SCANNED, LoadBalancer
from rollout_client.routing.member_records import MemberRecord, WeightsBounds
from rollout_worker.schemas import WeightsId


def members(count: int) -> list[Member]:
    return [Member(f"http://w{i}:8000", f"w{i}") for i in range(count)]


def balancer(count: int, **options: object) -> LoadBalancer:
    found = LoadBalancer(**options)  # type: ignore[arg-type]
    found.set_members(members(count), 0.0)
    return found


def chosen(found: LoadBalancer, key: str | None = None, now: float = 0.0, **more: object) -> str:
    member = found.choose_member(key, now, **more)  # type: ignore[arg-type]
    assert member is not None
    return member.name


def on(found: LoadBalancer, name: str) -> MemberRecord:
    return found.records[f"http://{name}:8000"]


def weights(epoch: int, version: int) -> WeightsId:
    return WeightsId(epoch=epoch, version=version)


def test_the_least_loaded_gets_it_and_equals_take_turns() -> None:
    found = balancer(3)
    assert sorted(chosen(found) for _ in range(3)) == ["w0", "w1", "w2"]
    found.release_member("http://w1:8000")
    assert chosen(found) == "w1"
    # One request at a time visits all of them instead of the first for ever.
    idle = balancer(3)
    visited = []
    for _ in range(3):
        visited.append(chosen(idle))
        idle.release_member(f"http://{visited[-1]}:8000")
    assert sorted(visited) == ["w0", "w1", "w2"]


def test_a_conversation_leaves_a_member_that_is_no_choice_at_all() -> None:
    found = balancer(3)
    home = chosen(found, "c")
    on(found, home).exclude_until("asleep", 0.0)
    away = chosen(found, "c")
    assert away != home
    on(found, home).admit_again()
    assert chosen(found, "c") == away, "that one has the prefix now"
    found.set_members([m for m in members(3) if m.name != away], 1.0)
    assert chosen(found, "c") != away


@pytest.mark.parametrize(("bound", "stays"), [(0, 1), (1, 1), (2, 2), (3, 3)], ids=str)
def test_the_bound_counts_the_request_itself(bound: int, stays: int) -> None:
    found = balancer(2, max_imbalance=bound)
    home = chosen(found, "c")
    assert [chosen(found, "c") for _ in range(stays - 1)] == [home] * (stays - 1)
    assert chosen(found, "c") != home
    with pytest.raises(ValueError, match="max_imbalance"):
        LoadBalancer(max_imbalance=-1)


def test_a_lonely_member_keeps_its_conversation_however_many_requests_it_has() -> None:
    found = balancer(1, max_imbalance=1)
    assert [chosen(found, "c") for _ in range(5)] == ["w0"] * 5


def test_the_oldest_conversations_are_forgotten() -> None:
    found = balancer(4, sticky_keys=2)
    homes = {key: chosen(found, key) for key in ("a", "b")}
    chosen(found, "a")  # used again: "b" is the oldest now
    homes["c"] = chosen(found, "c")
    for url in list(found.records):
        for _ in range(9):
            found.release_member(url)
    # Who is remembered goes home, though another one waits longer for its turn.
    assert chosen(found, "c") == homes["c"]
    assert chosen(found, "a") == homes["a"]
    assert list(found._last_url) == ["c", "a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200), st.integers(0, 6))
def test_no_choice_is_ever_beyond_the_bound(steps: list[tuple[str, bool]], bound: int) -> None:
    found = balancer(4, max_imbalance=bound)
    for key, release in steps:
        member = found.choose_member(key, 0.0)
        assert member is not None
        least = min(record.in_flight for record in found.records.values())
        # Whoever was the least loaded one may get it in any case.
        assert found.records[member.url].in_flight <= least + max(1, bound)
        if release:
            found.release_member(member.url)


def test_a_slow_member_gets_less() -> None:
    found = balancer(3)
    for name, pace in (("w0", 0.02), ("w1", 0.021), ("w2", 0.1)):
        found.note_pace(f"http://{name}:8000", pace, 0.0)
    load = Counter(chosen(found) for _ in range(44))
    assert load == {"w0": 20, "w1": 20, "w2": 4}, "five times slower: a fifth"


@pytest.mark.parametrize(
    ("pace", "slowness"),
    [(0.02, 1), (0.029, 1), (0.030, 1), (0.031, 1.55), (0.04, 2), (0.2, 10), (0.3, 10)],
    ids=str,
)
def test_up_to_half_as_slow_again_is_as_fast_as_usual(pace: float, slowness: float) -> None:
    found = balancer(3)
    for name, each in (("w0", 0.02), ("w1", 0.02), ("w2", pace)):
        found.note_pace(f"http://{name}:8000", each, 0.0)
    assert on(found, "w2").slowness == pytest.approx(slowness)
    assert on(found, "w0").slowness == 1


@pytest.mark.parametrize("pace", [0.029, 0.032], ids=str)
def test_a_conversation_leaves_a_member_as_soon_as_that_is_slow(pace: float) -> None:
    found = balancer(3)
    home = chosen(found, "c")
    for name in ("w0", "w1", "w2"):
        found.note_pace(f"http://{name}:8000", pace if name == home else 0.02, 0.0)
    assert (chosen(found, "c") == home) is (pace < 0.03)


def test_paces_are_smoothed_and_compared_with_the_lower_median() -> None:
    found = balancer(4)

    def saw(name: str, pace: float, now: float = 0.0) -> None:
        found.note_pace(f"http://{name}:8000", pace, now)

    for name, pace in (("w0", 1.0), ("w1", 3.0), ("w2", 4.0), ("w3", 30.0)):
        saw(name, pace)
    ratios = {record.member.name: record.slowness for record in found.records.values()}
    assert ratios == {"w0": 1, "w1": 1, "w2": 1, "w3": 10}
    saw("w3", 5.0, now=1.0)
    assert on(found, "w3").pace == pytest.approx(25.0)
    assert on(found, "w3").slowness == pytest.approx(25 / 3)
    # After a minute without a measurement nothing is held against it any more, but not before.
    slow = on(found, "w3")
    for name, now in (("w0", 60.0), ("w1", 61.0), ("w0", 61.5)):
        saw(name, 1.0, now)
        assert (slow.pace is None) is (slow.slowness == 1) is (now > 61)


def test_a_pace_of_nothing_makes_nobody_slow() -> None:
    found = balancer(2)
    for name, pace in (("w0", 0.0), ("w1", 0.02)):
        found.note_pace(f"http://{name}:8000", pace, 0.0)
    assert [record.slowness for record in found.records.values()] == [1, 1]


def test_of_many_members_some_are_compared() -> None:
    found = balancer(4 * MAX_SCANNED, seed=1)
    load = Counter(chosen(found) for _ in range(4 * MAX_SCANNED * 10))
    assert max(load.values()) <= 11, "near the mean of 10"
    assert len(load) == 4 * MAX_SCANNED


def test_the_only_one_of_many_is_found_and_the_paces_of_many_are_compared_now_and_then() -> None:
    found = balancer(4 * MAX_SCANNED, seed=1)
    for record in list(found.records.values())[1:]:
        record.exclude_until("asleep", 0.0)
    assert chosen(found, "c") == "w0"
    for name, pace in (("w0", 0.02), ("w1", 0.02), ("w2", 0.2)):
        found.note_pace(f"http://{name}:8000", pace, 0.0)
    slow = on(found, "w2")
    assert slow.slowness == 1
    found.note_pace("http://w0:8000", 0.02, 2.0)
    assert slow.slowness == 10
    found.set_members(members(4 * MAX_SCANNED)[1:], 3.0)
    found.release_member("http://w0:8000")
    assert found.choose_member("c", 3.0) is None, "the only one has left"


def test_the_stable_hash_is_the_same_in_every_process() -> None:
    five, four = balancer(5, deterministic=True), balancer(5, deterministic=True)
    # Part of the contract of such a run: another version of the client must choose alike.
    first = [chosen(five, key) for key in "0123456789"]
    assert first == ["w3", "w2", "w4", "w4", "w4", "w0", "w1", "w0", "w0", "w4"]
    # Only the keys of a member that leaves move.
    four.set_members(members(4), 1.0)
    for key in map(str, range(200)):
        before, after = chosen(five, key), chosen(four, key)
        assert before in ("w4", after)


def test_without_a_key_the_first_by_url_is_deterministic() -> None:
    found = LoadBalancer(deterministic=True)
    found.set_members(members(3)[::-1], 0.0)
    assert [chosen(found) for _ in range(3)] == ["w0"] * 3


def test_nothing_is_known_of_another_pod_at_the_same_address() -> None:
    found = balancer(1)
    found.choose_member(None, 0.0)
    record = on(found, "w0")
    record.excluded, record.info_at = "it broke", 99.0
    found.set_members([Member("http://w0:8000", "another")], 1.0)
    successor = on(found, "w0")
    assert (successor.excluded, successor.info_at) == ("", 0.0)
    assert (successor.member.name, successor.in_flight) == ("another", 1)


def test_who_is_out_gets_nothing_until_then_or_until_it_proves_itself() -> None:
    found = balancer(2)
    on(found, "w0").exclude_until("its queue is full", 0.0, until=5.0)
    on(found, "w1").exclude_until("asleep", 0.0)
    assert found.choose_member(None, 4.9) is None
    assert found.exclusion_reasons(4.9) == "w0: its queue is full; w1: asleep"
    assert found.exclusion_reasons(1e9) == "w0: serves; w1: asleep"
    assert chosen(found, now=5.0) == "w0"
    on(found, "w1").admit_again()
    assert chosen(found, now=5.0) == "w1"


def test_failures_are_counted_until_it_answers_well() -> None:
    found = balancer(1)
    record = on(found, "w0")
    for count in (1, 2, 3):
        on(found, "w0").exclude_until("reset", 7.0)
        assert (record.failures, record.probe_at) == (count, 7.0)
    on(found, "w0").admit_again()
    assert (record.failures, record.excluded, record.excluded_until) == (0, "", None)


def test_reasons_name_eight_members_and_count_the_others() -> None:
    found = balancer(8)
    assert found.exclusion_reasons(0.0) == "; ".join(f"w{i}: serves" for i in range(8))
    found.set_members(members(11), 0.0)
    first = "; ".join(f"w{i}: serves" for i in range(8))
    assert found.exclusion_reasons(0.0) == f"{first}; and 3 more"
    found.set_members([], 0.0)
    assert found.exclusion_reasons(0.0) == ""


def test_reasons_name_the_weights_that_are_too_old() -> None:
    found = balancer(2)
    on(found, "w0").active = weights(1, 4)
    floor = WeightsBounds(epoch=1, min_version=5)
    assert found.exclusion_reasons(0.0, floor) == "w0: has weights (1, 4); w1: serves"
    assert found.exclusion_reasons(0.0) == "w0: serves; w1: serves"
    chosen(found)
    chosen(found)
    found.set_members(members(1), 0.0)
    gone = on(found, "w1")
    assert gone.unusable_reason(0.0) == "gone"
    assert not gone.is_usable(0.0)
    assert found.present_members() == members(1)


def test_a_member_that_becomes_ready_is_probed_at_once() -> None:
    found = balancer(1)
    record = on(found, "w0")
    on(found, "w0").exclude_until("reset", 1.0)
    found.set_members([Member("http://w0:8000", "w0", ready=False)], 2.0)
    found.set_members([Member("http://w0:8000", "w0", ready=False)], 3.0)
    assert record.probe_at == 1.0
    found.set_members([Member("http://w0:8000", "w0", "http://w0:8001")], 4.0)
    assert record.probe_at == 4.0
    assert record.member.control_url == "http://w0:8001"
    found.set_members([Member("http://w0:8000", "w0")], 5.0)
    assert record.probe_at == 4.0


def test_who_comes_back_begins_anew_but_for_what_runs_on_it() -> None:
    found = balancer(2)
    chosen(found)
    chosen(found)
    url = "http://w1:8000"
    found.records[url].exclude_until("reset", 0.0)
    found.records[url].active = weights(1, 4)
    found.set_members(members(1), 1.0)
    found.set_members(members(2), 2.0)
    record = found.records[url]
    assert (record.excluded, record.active, record.in_flight, record.failures) == ("", None, 1, 0)
    assert record.chosen == 2, "of equals it is the last to get a request"
    found.set_members(members(1), 3.0)
    found.release_member(url)
    assert list(found.records) == ["http://w0:8000"], "nothing is left of it"
    found.release_member(url)  # late, unknown: no harm


def test_not_ready_means_nothing_new_and_avoided_means_last() -> None:
    found = balancer(2)
    found.set_members([members(2)[0], Member("http://w1:8000", "w1", ready=False)], 0.0)
    assert [chosen(found) for _ in range(3)] == ["w0"] * 3
    assert found.exclusion_reasons(0.0) == "w0: serves; w1: not ready"
    assert chosen(found, avoid=["http://w0:8000"]) == "w0", "rather that one than none"
    found.set_members(members(2), 0.0)
    assert chosen(found, avoid=["http://w1:8000"]) == "w0"


@pytest.mark.parametrize(
    ("bounds", "active", "admitted"),
    [
        (WeightsBounds(), (0, 0), True),
        (WeightsBounds(min_version=3), (2, 3), True),
        (WeightsBounds(min_version=3), (2, 2), False),
        (WeightsBounds(epoch=2, min_version=3), (3, 0), True),
        (WeightsBounds(epoch=2, min_version=3), (1, 9), False),
        (WeightsBounds(epoch=2), (1, 9), False),
        (WeightsBounds(exact_version=3), (2, 3), True),
        (WeightsBounds(exact_version=3), (2, 4), False),
        (WeightsBounds(epoch=1, exact_version=3), (2, 3), False),
    ],
)
def test_bounds_read_as_the_workers_admission_reads_them(
    bounds: WeightsBounds, active: tuple[int, int], admitted: bool
) -> None:
    assert bounds.admits(weights(*active)) is admitted
    assert bounds.admits(None)
    found = balancer(1)
    on(found, "w0").active = weights(*active)
    assert (found.choose_member(None, 0.0, bounds) is not None) is admitted


def test_an_exact_version_that_all_have_passed_is_all_beyond() -> None:
    found = balancer(2)
    exact = WeightsBounds(epoch=1, exact_version=3)
    on(found, "w0").active = weights(1, 4)
    assert not found.all_beyond(exact), "the other one may have it"
    on(found, "w1").active = weights(2, 0)
    assert found.all_beyond(exact)
    assert not found.all_beyond(WeightsBounds(epoch=1, min_version=9))
    on(found, "w0").active = weights(1, 3)
    assert not found.all_beyond(exact), "one has just that"
    # Without an epoch it is the version of whichever epoch a member is in.
    for version, beyond in ((2, False), (3, False), (4, True)):
        found.set_members(members(1), 0.0)
        on(found, "w0").active = weights(7, version)
        assert found.all_beyond(WeightsBounds(exact_version=3)) is beyond
    found.set_members([], 0.0)
    assert not found.all_beyond(exact), "nobody is there: somebody may come"


def test_of_the_members_that_serve_all_are_beyond_an_exact_version() -> None:
    found = balancer(2)
    exact = WeightsBounds(epoch=1, exact_version=3)
    on(found, "w0").active = weights(1, 4)
    assert not found.all_beyond(exact, serving=True), "the other one may have it"
    on(found, "w1").exclude_until("its queue is full", 0.0, 5.0)
    assert not found.all_beyond(exact, serving=True), "it takes requests again by itself"
    on(found, "w1").exclude_until("no answer", 0.0)
    assert found.all_beyond(exact, serving=True)
    assert not found.all_beyond(exact), "it may come back"
    on(found, "w0").exclude_until("no answer", 0.0)
    assert not found.all_beyond(exact, serving=True), "none serves: one may come back"


def test_unproven_members_wait_for_their_probe() -> None:
    found = LoadBalancer()
    found.set_members([Member("http://w0:8000", "w0", proven=False)], 3.0)
    assert found.choose_member(None, 3.0) is None
    assert found.exclusion_reasons(3.0) == "w0: not asked yet"
    assert on(found, "w0").probe_at == 3.0
    on(found, "w0").admit_again()
    assert chosen(found) == "w0"


def test_urls_become_members_with_their_control_ports() -> None:
    first, second = static_members(["http://10.0.0.1:8000/", "http://[fd00::1]:9000"])
    assert (first.url, first.control_url) == ("http://10.0.0.1:8000", "http://10.0.0.1:8001")
    assert (second.url, second.control_url) == ("http://[fd00::1]:9000", None)
    assert len(static_members(["http://a:8000", "http://a:8000/"])) == 1
    with pytest.raises(ValueError, match="is not a URL"):
        static_members(["10.0.0.1:8000"])
    with pytest.raises(ValueError, match="1 urls but 2"):
        static_members(["http://a:1"], ["http://a:2", None])


def test_weights_of_a_member_that_comes_back_are_unknown() -> None:
    """It left the Service to load what the others had committed."""
    balancer = LoadBalancer()
    member = Member("http://a", "a")
    balancer.set_members([member], 0.0)
    record = balancer.records[member.url]
    record.active = WeightsId(epoch=1, version=4)
    balancer.set_members([replace(member, ready=False)], 1.0)
    assert record.active is not None
    balancer.set_members([member], 2.0)
    assert record.active is None
    assert balancer.choose_member(None, 3.0, WeightsBounds(epoch=1, min_version=5)) == member
