"""The store: order by resourceVersion, tombstones, ghosts; and what it must equal in the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_operator.api.names import LABEL_MANAGED_BY, LABEL_POOL, MANAGER_NAME
from rollout_operator.api.objects import Obj, PoolKey, ResourceName
from rollout_operator.cache.object_store import ListOutcome, ObjectStore

KEY = PoolKey("rl", "math")


class RawStore(ObjectStore[Obj]):
    """Takes raw objects, and keeps pods raw, too."""

    def __init__(self, operator_class: str = "") -> None:
        super().__init__(lambda pod: pod, operator_class)

    def sees(self, resource: ResourceName, event: str | None, obj: Obj) -> set[PoolKey]:
        return self.apply_event(resource, event, self.read_object(resource, obj))

    def lists(
        self, resource: ResourceName, objs: Iterable[Obj], listed_at: str, **of: str
    ) -> ListOutcome:
        read = [self.read_object(resource, obj) for obj in objs]
        return self.replace_listed(
            resource, read, listed_at=listed_at, namespace=of.get("namespace")
        )


@pytest.fixture
def store() -> RawStore:
    return RawStore()


def pod(name: str, version: int, *, uid: str | None = None, pool: str | None = "math") -> Obj:
    labels = {LABEL_MANAGED_BY: MANAGER_NAME} | ({LABEL_POOL: pool} if pool else {})
    return {
        "metadata": {
            "namespace": "rl",
            "name": name,
            "uid": uid or f"uid-{name}",
            "resourceVersion": str(version),
            "labels": labels,
        }
    }


def pool(version: int, name: str = "math", namespace: str = "rl", **meta: Any) -> Obj:
    return {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            **meta,
        }
    }


def names(store: RawStore) -> list[str]:
    return [p["metadata"]["name"] for p in store.pool_pods(KEY)]


def test_an_event_is_kept_and_names_the_pool_to_wake(store: RawStore) -> None:
    assert store.sees("pools", "ADDED", pool(1)) == {KEY}
    assert store.sees("pods", "ADDED", pod("b", 2)) == {KEY}
    assert store.sees("pods", None, pod("a", 3)) == {KEY}
    assert store.find_pool(KEY) == pool(1)
    assert names(store) == ["a", "b"]
    assert store.pool_keys() == [KEY]
    counts = {name: count for name, count in store.object_counts().items() if count}
    assert counts == {"pools": 1, "pods": 2}


def going(version: int, name: str = "a") -> Obj:
    found = pod(name, version)
    return {"metadata": found["metadata"] | {"deletionTimestamp": "1970-01-01T00:00:00Z"}}


A = PoolKey("rl", "a")


def test_the_answer_to_a_delete_is_not_undone_by_what_the_watch_shows_late(
    store: RawStore,
) -> None:
    store.sees("pods", "ADDED", pod("a", 2))
    assert store.upsert_deleted("pods", A, "uid-a", going(5))
    assert store.sees("pods", "MODIFIED", pod("a", 3)) == set(), "from before the delete"
    store.lists("pods", [pod("a", 4)], listed_at="4")
    assert store.pool_pods(KEY) == [going(5)]
    assert store.sees("pods", "MODIFIED", going(5)) == set(), "the watch shows what is known"
    assert store.sees("pods", "DELETED", going(6)) == {KEY}
    assert not store.upsert_deleted("pods", A, "uid-a", going(5)), "the watch was faster"
    assert store.pool_pods(KEY) == []


def test_an_answer_without_a_version_says_that_the_object_is_gone(store: RawStore) -> None:
    """As the API server answers where another delete was faster; the watch may have shown the end long ago."""
    answer = going(0)
    del answer["metadata"]["resourceVersion"]
    store.sees("pods", "ADDED", pod("a", 2))
    assert store.upsert_deleted("pods", A, "uid-a", answer)
    assert store.sees("pods", "MODIFIED", pod("a", 2)) == set(), "a late event"
    assert store.pool_pods(KEY) == []
    store.sees("pods", "DELETED", pod("a", 4))
    store.lists("pods", [], listed_at="5")
    assert not store.upsert_deleted("pods", A, "uid-a", answer)
    assert store.pool_pods(KEY) == []


def test_a_delete_hides_no_namesake(store: RawStore) -> None:
    store.sees("pods", "ADDED", pod("a", 9, uid="another"))
    assert not store.upsert_deleted("pods", A, "uid-a", {"kind": "Status"})
    assert not store.upsert_deleted("pods", A, "uid-a", going(5))
    assert store.pool_pods(KEY) == [pod("a", 9, uid="another")]


def test_a_create_that_the_watch_has_not_shown_outlives_an_older_list(store: RawStore) -> None:
    store.upsert_written("pods", pod("a", 7))
    store.lists("pods", [], listed_at="6")
    assert names(store) == ["a"]
    store.lists("pods", [], listed_at="8")
    assert names(store) == []


def of_class(found: Obj, operator_class: str | None) -> Obj:
    return found | {"spec": {"operatorClass": operator_class} if operator_class else {}}


@pytest.mark.parametrize(
    ("ours", "of_pool", "leads"),
    [("", None, True), ("blue", "blue", True), ("", "blue", False), ("blue", None, False),
     ("blue", "green", False)],
)  # fmt: skip
@pytest.mark.parametrize("way", ["watch", "list"])
def test_a_pool_of_another_class_and_its_children_are_left_alone(
    ours: str, of_pool: str | None, leads: bool, way: str
) -> None:
    store = RawStore(ours)
    theirs, child = of_class(pool(1), of_pool), pod("math-0-0", 2)
    if way == "watch":
        store.sees("pools", "ADDED", theirs)
        woken = store.sees("pods", "ADDED", child)
    else:
        store.lists("pools", [theirs], listed_at="5")
        woken = store.lists("pods", [child], listed_at="5").touched
    assert woken == ({KEY} if leads else set())
    assert store.find_pool(KEY) == (theirs if leads else None)
    assert (store.pool_keys(), names(store), store.pod_count(KEY)) == (
        ([KEY], ["math-0-0"], 1) if leads else ([], [], 0)
    )


def test_a_pool_whose_name_goes_to_one_of_another_class_is_let_go() -> None:
    store = RawStore("blue")
    store.sees("pools", "ADDED", of_class(pool(1), "blue"))
    again = of_class(pool(5), "green")
    assert store.sees(
        "pools", "MODIFIED", again | {"metadata": again["metadata"] | {"uid": "b"}}
    ) == {KEY}
    assert store.find_pool(KEY) is None


def test_managed_fields_are_not_kept(store: RawStore) -> None:
    store.upsert_written("pools", pool(1, managedFields=[{"manager": "kubectl"}]))
    assert store.find_pool(KEY) == pool(1)


def test_an_event_that_changes_nothing_that_passes_read_wakes_nobody() -> None:
    store = ObjectStore(lambda pod: pod["metadata"].get("annotations"))

    def sees(version: int, note: str) -> set[PoolKey]:
        obj = pod("a", version)
        obj["metadata"]["annotations"] = {"note": note}
        return store.apply_event("pods", "MODIFIED", store.read_object("pods", obj))

    assert sees(1, "x") == {KEY}
    assert sees(2, "x") == set()
    assert sees(4, "y") == {KEY}
    assert sees(5, "y") == set()
    assert sees(4, "late") == set(), "the version counts, though nothing else changed"
    assert store.pool_pods(KEY) == [{"note": "y"}]


def test_the_status_of_a_budget_wakes_nobody_and_its_version_is_known(store: RawStore) -> None:
    """Kubernetes writes it whenever a pod of the pool gets Ready or ceases to be."""

    def budget(version: int, least: int) -> Obj:
        meta = pod("math", version)["metadata"]
        return {
            "metadata": meta,
            "spec": {"minAvailable": least},
            "status": {"currentHealthy": version},
        }

    assert store.sees("poddisruptionbudgets", "ADDED", budget(1, 3)) == {KEY}
    assert store.sees("poddisruptionbudgets", "MODIFIED", budget(2, 3)) == set()
    [known] = store.pool_budgets(KEY)
    assert known["metadata"]["resourceVersion"] == "2", "a patch names it"
    assert store.sees("poddisruptionbudgets", "MODIFIED", budget(3, 2)) == {KEY}


@pytest.mark.parametrize(
    "stranger",
    [
        pytest.param({LABEL_POOL: "math"}, id="not managed by us"),
        pytest.param({LABEL_MANAGED_BY: MANAGER_NAME}, id="of no pool"),
        pytest.param(None, id="without labels"),
    ],
)
def test_a_strangers_pod_is_not_kept(store: RawStore, stranger: dict[str, str] | None) -> None:
    obj = pod("a", 1)
    obj["metadata"]["labels"] = stranger
    assert store.sees("pods", "ADDED", obj) == set()
    assert store.pool_pods(KEY) == []


def test_an_older_or_equal_version_changes_and_wakes_nothing(store: RawStore) -> None:
    store.upsert_written("pods", pod("a", 7))
    assert store.sees("pods", "MODIFIED", pod("a", 6)) == set()
    assert store.sees("pods", "MODIFIED", pod("a", 7)) == set()
    assert store.pool_pods(KEY) == [pod("a", 7)]


def test_a_pod_that_changes_its_pool_touches_both(store: RawStore) -> None:
    store.sees("pods", "ADDED", pod("a", 5))
    other = PoolKey("rl", "code")
    assert store.sees("pods", "MODIFIED", pod("a", 6, pool="code")) == {KEY, other}
    assert names(store) == []
    assert [p["metadata"]["name"] for p in store.pool_pods(other)] == ["a"]
    assert store.sees("pods", "MODIFIED", pod("a", 7, pool=None)) == {other}


def test_a_list_removes_ghosts_and_brings_what_is_new(store: RawStore) -> None:
    for name in ("a", "b", "c"):
        store.sees("pods", "ADDED", pod(name, 5))
    found = store.lists("pods", [pod("a", 5), pod("d", 8)], listed_at="9")
    assert found == ({KEY}, 2, False)
    assert names(store) == ["a", "d"]
    # What it removed does not come back by an event from before the list.
    assert store.sees("pods", "MODIFIED", pod("b", 9)) == set()


def test_a_list_that_changes_nothing_touches_nothing(store: RawStore) -> None:
    store.sees("pods", "ADDED", pod("a", 5))
    assert store.lists("pods", [pod("a", 5)], listed_at="9").touched == set()


def test_a_list_of_one_namespace_leaves_the_others_alone(store: RawStore) -> None:
    store.sees("pools", "ADDED", pool(1))
    store.sees("pools", "ADDED", pool(2, namespace="elsewhere"))
    found = store.lists("pools", [], listed_at="9", namespace="rl")
    assert found.touched == {KEY}
    assert store.pool_keys() == [PoolKey("elsewhere", "math")]


def test_after_a_list_nothing_older_is_believed(store: RawStore) -> None:
    store.lists("pods", [pod("a", 5)], listed_at="10", namespace="rl")
    assert store.sees("pods", "ADDED", pod("never-seen", 9)) == set()
    assert store.sees("pods", "ADDED", pod("b", 11)) == {KEY}


def test_a_cluster_restored_from_a_backup_is_believed(store: RawStore) -> None:
    store.lists("pods", [pod("a", 50), pod("b", 60)], listed_at="100")
    assert store.lists("pods", [pod("a", 20)], listed_at="40") == ({KEY}, 0, True)
    assert store.pool_pods(KEY) == [pod("a", 20)]
    assert store.sees("pods", "MODIFIED", pod("a", 41)) == {KEY}


def test_a_backup_from_after_the_last_list_undoes_what_came_since(store: RawStore) -> None:
    """Events, our own writes, and a delete: all newer than the list before, and than the cluster now."""
    store.lists("pods", [pod("a", 5), pod("b", 6)], listed_at="10")
    store.sees("pods", "MODIFIED", pod("a", 20))
    store.upsert_written("pods", pod("c", 25))
    store.upsert_deleted("pods", PoolKey("rl", "b"), "uid-b", {"kind": "Status"})
    store.sees("pods", "DELETED", pod("b", 30))
    store.begin_list("pods")
    found = store.lists("pods", [pod("a", 5), pod("b", 6)], listed_at="12")
    assert found == ({KEY}, 0, True)
    assert store.pool_pods(KEY) == [pod("a", 5), pod("b", 6)]
    assert store.sees("pods", "MODIFIED", pod("a", 13)) == {KEY}, "older than what is undone"


def test_a_write_during_a_list_is_no_backup(store: RawStore) -> None:
    store.sees("pods", "ADDED", pod("a", 5))
    store.begin_list("pods")
    store.upsert_written("pods", pod("b", 12))
    assert not store.lists("pods", [pod("a", 5)], listed_at="10").rewound
    assert names(store) == ["a", "b"]


def test_a_backup_whose_versions_have_caught_up_is_believed(store: RawStore) -> None:
    """Others have written so much since that no version tells: a list is true of all that is not newer."""
    store.sees("pods", "ADDED", pod("a", 20))
    store.sees("pods", "ADDED", pod("b", 6))
    store.sees("pods", "DELETED", pod("b", 21))
    store.begin_list("pods")
    found = store.lists("pods", [pod("a", 5), pod("b", 6)], listed_at="40")
    assert found == ({KEY}, 0, False)
    assert store.pool_pods(KEY) == [pod("a", 5), pod("b", 6)]


def test_each_namespace_is_believed_when_its_own_list_comes(store: RawStore) -> None:
    store.sees("pools", "ADDED", pool(50))
    store.sees("pools", "ADDED", pool(60, namespace="elsewhere"))
    for namespace in ("rl", "elsewhere"):
        store.begin_list("pools", namespace)
    assert store.lists("pools", [pool(20)], listed_at="40", namespace="rl").rewound
    assert store.find_pool(PoolKey("elsewhere", "math")) == pool(60, namespace="elsewhere")
    assert store.lists("pools", [], listed_at="41", namespace="elsewhere").rewound
    assert store.pool_keys() == [KEY]


def test_versions_that_are_no_numbers_take_what_came_last(store: RawStore) -> None:
    first, second = pod("a", 1), pod("a", 1)
    first["metadata"]["resourceVersion"] = "x9"
    second["metadata"]["resourceVersion"] = "x1"
    store.sees("pods", "ADDED", first)
    assert store.sees("pods", "MODIFIED", second) == {KEY}
    assert store.pool_pods(KEY) == [second]
    assert store.lists("pods", [], listed_at="y").touched == {KEY}


History = list[tuple[str, str, int]]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """A true history: (event, name, version); a name that was deleted comes back as another."""
    history: History = []
    alive: set[str] = set()
    for version in range(1, draw(st.integers(1, 25)) + 1):
        name = draw(st.sampled_from("abc"))
        if name not in alive:
            event = "ADDED"
            alive.add(name)
        elif draw(st.booleans()):
            event = "MODIFIED"
        else:
            event = "DELETED"
            alive.discard(name)
        history.append((event, name, version))
    return history


def replay(history: History) -> dict[str, Obj]:
    """What the API server holds after this history; a new life has a new uid."""
    world: dict[str, Obj] = {}
    for event, name, version in history:
        if event == "DELETED":
            del world[name]
        else:
            world[name] = pod(name, version, uid=life(history, name, version))
    return world


def life(history: History, name: str, version: int) -> str:
    births = [v for e, n, v in history if n == name and e == "ADDED" and v <= version]
    return f"{name}-{births[-1]}"


@given(histories(), st.data())
def test_whatever_is_lost_late_or_twice_a_list_makes_it_true(
    history: History, data: st.DataObject
) -> None:
    events = data.draw(st.permutations(history))
    events = [e for e in events if data.draw(st.booleans())]
    cut = data.draw(st.integers(0, len(events)))
    store = RawStore()

    def deliver(part: History) -> None:
        for event, name, version in part:
            obj = pod(name, version, uid=life(history, name, version))
            store.sees("pods", event, obj)

    deliver(events[:cut])
    world = replay(history)
    store.lists("pods", list(world.values()), listed_at=str(len(history)))
    deliver(events[cut:])
    assert store.pool_pods(KEY) == [world[name] for name in sorted(world)]


@given(histories())
def test_a_stream_without_faults_needs_no_list(history: History) -> None:
    store = RawStore()
    for event, name, version in history:
        store.sees("pods", event, pod(name, version, uid=life(history, name, version)))
    world = replay(history)
    assert store.pool_pods(KEY) == [world[name] for name in sorted(world)]
