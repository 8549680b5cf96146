"""Beside which trainer pod a colocated pod belongs: in any order, of any kind of claim, with numbers."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_common.device_claims import natural_sort_key
from rollout_operator.api.spec import RolloutReplicaSpec
from rollout_operator.core.observed_pool import Pod
from rollout_operator.core.placement import (
    PlacementPending,
    PlacementPlanner,
    PlacementProblem,
    PlacementResult,
    PodPlacement,
)
from rollout_operator.core.settings import TRAINERS_SETTLED_SECONDS
from rollout_operator.core.trainer_pods import (
    AllocatedDevice,
    DeviceClaim,
    DeviceSlice,
    ObservedTrainers,
    RecordedPlacement,
    TrainerPod,
    TrainerWatch,
    parse_resource_claim,
    parse_resource_slice,
    parse_trainer,
    published_uuids,
)
from tests.support.unit.poolspecs import a_pod, colocated_spec


def trainer(name: str, **fields: Any) -> TrainerPod:
    """A pod of a trainer on a node of its own, with one claim."""
    made = TrainerPod(name, f"uid of {name}", node=f"node of {name}", claims=(f"claim of {name}",))
    return replace(made, **fields)


def claim(of: str, count: int = 8, **fields: Any) -> DeviceClaim:
    """The claim of a trainer's pod, allocated, with so many devices of one request."""
    found = tuple(
        AllocatedDevice("gpus", "gpu.example.com", f"node of {of}", f"gpu-{i}")
        for i in range(count)
    )
    name = f"claim of {of}"
    made = DeviceClaim(name, f"uid of {name}", requests=("gpus",), allocated=True, devices=found)
    return replace(made, **fields)


def beside(
    *trainers: TrainerPod, claims: tuple[DeviceClaim, ...] | None = None
) -> ObservedTrainers:
    found = tuple(claim(t.name) for t in trainers) if claims is None else claims
    devices = [device.name for each in found for device in each.devices]
    uuids = {name: f"GPU-{name}" for name in devices}
    return ObservedTrainers(trainers, {c.name: c for c in found}, uuids=uuids)


def first_place(spec: RolloutReplicaSpec, known: ObservedTrainers) -> PlacementResult:
    """The place of a pool's first pod."""
    return PlacementPlanner(spec, known).placement_for(0, 0)


def lost(spec: RolloutReplicaSpec, known: ObservedTrainers, pod: Pod) -> str | None:
    """Why a pod has to go."""
    return PlacementPlanner(spec, known).lost_reason(pod)


def place(answer: object) -> PodPlacement:
    assert isinstance(answer, PodPlacement), answer
    return answer


def why(answer: object) -> str:
    assert isinstance(answer, PlacementPending), answer
    return answer.why


def wrong(answer: object) -> tuple[str, str]:
    assert isinstance(answer, PlacementProblem), answer
    return answer.reason, answer.message


def pod_at(found: PodPlacement, replica: int = 0, **fields: Any) -> Pod:
    """A pod that was made for this place, and runs there."""
    taken = RecordedPlacement(found.trainer, found.claim_uid, found.devices)
    spec = colocated_spec(replicas=1)
    return a_pod(spec, replica, colocated=True, taken=taken, node=found.node, **fields)


NAMES = [f"t-{i}" for i in range(8)]


@given(st.permutations(NAMES), st.randoms(use_true_random=False))
def test_eight_trainers_of_eight_devices_with_four_slots(order: list[str], random: Random) -> None:
    """32 rollout pods; whatever was made first, each has its two devices, and nobody else has them."""
    spec = colocated_spec(replicas=32, slots=4, tensor=2)
    found = [claim(name) for name in order]
    random.shuffle(found)
    places = PlacementPlanner(spec, beside(*map(trainer, order), claims=tuple(found)))
    used: set[tuple[str, str]] = set()
    for replica in range(32):
        mine = place(places.placement_for(replica, 0))
        assert mine.trainer == f"t-{replica // 4}"
        assert (mine.node, mine.claim) == (f"node of {mine.trainer}", f"claim of {mine.trainer}")
        first = 2 * (replica % 4)
        where = f"gpu.example.com/node of {mine.trainer}/gpu-"
        assert mine.devices == (f"{where}{first}", f"{where}{first + 1}")
        assert mine.uuids == tuple(f"GPU-{name}" for name in mine.devices)
        assert not used & {(mine.claim_uid, d) for d in mine.devices}
        used |= {(mine.claim_uid, d) for d in mine.devices}
    assert len(used) == 64


FEW = NAMES[:3]
FACTS = [
    (name, fact) for name in FEW for fact in ("exists", "has a claim", "scheduled", "allocated")
]


def so_far(facts: set[tuple[str, str]]) -> ObservedTrainers:
    """The part of three trainers and their claims that is there: whatever may come before what else."""

    def trainer_of(name: str) -> TrainerPod:
        whole = trainer(name)
        return whole if (name, "scheduled") in facts else replace(whole, node=None)

    def claim_of(name: str) -> DeviceClaim:
        whole = claim(name)
        return (
            whole if (name, "allocated") in facts else replace(whole, allocated=False, devices=())
        )

    there = [trainer_of(name) for name in FEW if (name, "exists") in facts]
    claims = tuple(claim_of(name) for name in FEW if (name, "has a claim") in facts)
    return beside(*there, claims=claims)


@given(st.permutations(FACTS), st.data())
def test_on_the_way_a_pod_has_its_last_place_or_none(
    order: list[tuple[str, str]], data: st.DataObject
) -> None:
    """Whatever is there so far, in whatever order it came: nobody has to move once all is there."""
    spec = colocated_spec(replicas=12, slots=4, tensor=2)
    whole = PlacementPlanner(spec, so_far(set(FACTS)))
    known = so_far(set(order[: data.draw(st.integers(0, len(order)))]))
    now = PlacementPlanner(spec, known)
    for replica in range(12):
        last, answer = place(whole.placement_for(replica, 0)), now.placement_for(replica, 0)
        if isinstance(answer, PodPlacement):
            assert answer == last
        elif len(known.trainers) == len(FEW):
            assert f"t-{replica // 4}'" in why(answer), "it is told beside whom it will be"
        else:
            assert wrong(answer)[0] == "TooFewTrainers"
        if known.claims and last.claim in known.claims:
            assert now.lost_reason(pod_at(last, replica)) is None, "who is in its last place stays"


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_two_pods_get_one_device(trainers: int, slots: int, each: int, random: Random) -> None:
    spec = colocated_spec(replicas=trainers * slots, slots=slots, tensor=each)
    there = [trainer(f"job-{i}-{random.randrange(999)}") for i in range(trainers)]
    claims = tuple(claim(t.name, slots * each) for t in there)
    random.shuffle(there)
    places = PlacementPlanner(spec, beside(*there, claims=claims))
    used = [d for i in range(trainers * slots) for d in place(places.placement_for(i, 0)).devices]
    assert len(used) == len(set(used)) == trainers * slots * each


def test_names_are_ordered_by_their_numbers() -> None:
    order = ["b", "t", "t-2", "t-10", "t-10-a", "t2", "t10"]
    assert sorted(sorted(order), key=natural_sort_key) == [
        "b",
        "t",
        "t2",
        "t10",
        "t-2",
        "t-10",
        "t-10-a",
    ]
    spec = colocated_spec(replicas=12)
    places = PlacementPlanner(spec, beside(*(trainer(f"t-{i}") for i in range(12)), claims=tuple(
        claim(f"t-{i}", 1) for i in range(12)
    )))  # fmt: skip
    assert place(places.placement_for(10, 0)).trainer == "t-10"


def test_devices_are_ordered_by_pool_and_number() -> None:
    spec = colocated_spec(replicas=2, slots=2, tensor=2)
    found = tuple(
        AllocatedDevice("gpus", "gpu.example.com", pool, device)
        for pool, device in (("b", "gpu-0"), ("a", "gpu-10"), ("a", "gpu-9"), ("b", "gpu-1"))
    )
    places = PlacementPlanner(spec, beside(trainer("t"), claims=(claim("t", devices=found),)))
    shares = [place(places.placement_for(i, 0)).devices for i in range(2)]
    where = "gpu.example.com/"
    assert shares == [
        (f"{where}a/gpu-9", f"{where}a/gpu-10"),
        (f"{where}b/gpu-0", f"{where}b/gpu-1"),
    ]


@pytest.mark.parametrize(
    ("pod", "change", "told"),
    [
        ({"deleting": True}, {}, "waits for the trainer's pod 't' to go and come back"),
        (
            {"claims": (), "unmade": ("gpus",)},
            {},
            "waits for the ResourceClaim 'gpus' of the trainer's pod 't' to be made",
        ),
        (
            {"claims": ("other",)},
            {},
            "waits for the ResourceClaim 'other' of the trainer's pod 't', which does not exist yet",
        ),
        (
            {"node": None},
            {},
            "waits for the trainer's pod 't' to be scheduled, which needs ResourceClaim 'claim of t'",
        ),
        (
            {"node": None, "claims": (), "extended": True},
            {},
            "waits for the trainer's pod 't' to be scheduled",
        ),
        (
            {},
            {"deleting": True},
            "waits for a new ResourceClaim of the trainer's pod 't': 'claim of t' is being deleted",
        ),
        (
            {},
            {"allocated": False, "devices": ()},
            "waits for the ResourceClaim 'claim of t' of the trainer's pod 't' to be allocated",
        ),
    ],
)
def test_what_is_waited_for_is_named(
    pod: dict[str, Any], change: dict[str, Any], told: str
) -> None:
    spec = colocated_spec(replicas=1, tensor=8)
    found = beside(trainer("t", **pod), claims=(claim("t", **change),))
    assert why(first_place(spec, found)) == told


def test_what_is_not_listed_is_waited_for() -> None:
    spec = colocated_spec(replicas=1)
    known = ObservedTrainers()
    assert why(first_place(spec, known)) == ("waits for the list of the trainer's pods and claims")
    known = ObservedTrainers(unknown="list pods rl: forbidden")
    assert why(first_place(spec, known)).endswith("claims: list pods rl: forbidden")


def test_too_few_trainers_are_told_with_the_numbers() -> None:
    spec = colocated_spec(replicas=5, slots=2, tensor=4)
    reason, text = wrong(first_place(spec, beside(trainer("t-0"), trainer("t-1"))))
    assert reason == "TooFewTrainers"
    assert text == (
        "the pool needs 3 of the trainer's pods for 5 of its own (spec.colocation.slots 2), and "
        "spec.colocation.trainerSelector (job=grpo) selects 2: start more of them or lower spec.replicas"
    )


@pytest.mark.parametrize(("slots", "tensor"), [(3, 2), (2, 2), (4, 4), (1, 1)])
def test_a_share_that_does_not_fit_is_told_with_the_numbers(slots: int, tensor: int) -> None:
    spec = colocated_spec(replicas=1, slots=slots, tensor=tensor)
    reason, text = wrong(first_place(spec, beside(trainer("t"))))
    assert reason == "UnequalShares"
    assert text == (
        f"request 'gpus' of ResourceClaim 'claim of t' has 8 devices, and {slots} slots of {tensor} "
        f"(tensor·pipeline·data of spec.parallelism) need {slots * tensor}: change "
        "spec.colocation.slots, spec.parallelism or the claim"
    )


def test_a_share_of_devices_without_uuids_is_told_and_moves_nobody() -> None:
    """Names, the bus and CUDA each have an order of their own: who guesses may compute on another's."""
    spec = colocated_spec(replicas=2, slots=2, tensor=4)
    known = beside(trainer("t"))
    mine = pod_at(place(PlacementPlanner(spec, known).placement_for(1, 0)), 1)
    rest = {name: uuid for name, uuid in known.uuids.items() if not name.endswith("gpu-5")}
    unknown = replace(known, uuids=rest)
    assert isinstance(first_place(spec, unknown), PodPlacement), "all of its own are known"
    reason, text = wrong(PlacementPlanner(spec, unknown).placement_for(1, 0))
    assert reason == "NoDeviceUuid"
    assert text == (
        "the driver of gpu.example.com/node of t/gpu-5 publishes no attribute uuid of it in a ResourceSlice, "
        "so a pod can't know which of the 8 devices of ResourceClaim 'claim of t' are its own: use a "
        "driver that does, or spec.colocation.slots 1"
    )
    assert lost(spec, unknown, mine) is None
    whole = colocated_spec(replicas=1, tensor=8)
    found = place(first_place(whole, replace(known, uuids={})))
    assert found.uuids == (), "who has all of a claim needs no order"


def test_uuids_are_those_of_a_pools_latest_slices() -> None:
    def read(generation: int, **attributes: Any) -> DeviceSlice:
        devices = [{"name": "gpu-0", "attributes": attributes}, {"name": "gpu-1"}]
        pool = {"name": "n1", "generation": generation}
        return parse_resource_slice({"spec": {"driver": "d.com", "pool": pool, "devices": devices}})

    plain, whole = {"string": "GPU-a"}, {"string": "GPU-b"}
    slices = [read(2, uuid=plain), read(1, **{"d.com/uuid": whole})]
    assert published_uuids(slices) == {"d.com/n1/gpu-0": "GPU-a"}
    assert published_uuids(slices[1:]) == {"d.com/n1/gpu-0": "GPU-b"}
    assert published_uuids([read(1, uuid={"int": 3}), read(2, index={"int": 0})]) == {}


def test_a_pod_without_claims_is_told() -> None:
    spec = colocated_spec(replicas=1)
    reason, text = wrong(first_place(spec, beside(trainer("t", claims=()))))
    assert reason == "NoClaim"
    assert text.startswith("the trainer's pod 't' has no ResourceClaim: give it one")


TWO = (
    AllocatedDevice("half-0", "d", "p", "gpu-0"),
    AllocatedDevice("half-1", "d", "p", "gpu-1"),
    AllocatedDevice("half-1/cheap", "d", "p", "gpu-2"),
)


def test_the_request_chooses_among_requests_and_claims() -> None:
    halves = claim("t", requests=("half-0", "half-1"), devices=TWO)
    nic = claim("nic", requests=("nics",), devices=(AllocatedDevice("nics", "nic", "p", "nic-0"),))
    known = beside(trainer("t", claims=("claim of t", "claim of nic")), claims=(halves, nic))
    mine = place(
        PlacementPlanner(colocated_spec(replicas=1, request="half-0"), known).placement_for(0, 0)
    )
    assert (mine.claim, mine.request, mine.devices) == ("claim of t", "half-0", ("d/p/gpu-0",))
    other = colocated_spec(replicas=2, request="half-1", slots=2)
    assert place(PlacementPlanner(other, known).placement_for(1, 0)).devices == ("d/p/gpu-2",), (
        "an alternative's"
    )
    reason, text = wrong(PlacementPlanner(colocated_spec(replicas=1), known).placement_for(0, 0))
    assert reason == "AmbiguousClaim"
    assert text == (
        "the trainer's pod 't' has 3 requests of devices (claim of t/half-0, claim of t/half-1, "
        "claim of nic/nics): set spec.colocation.request"
    )
    reason, text = wrong(
        PlacementPlanner(colocated_spec(replicas=1, request="gpus"), known).placement_for(0, 0)
    )
    assert reason == "NoClaim"
    assert (
        "has a request 'gpus' as in spec.colocation.request: claim of t has half-0, half-1" in text
    )
    again = replace(nic, requests=("half-0",))
    known = beside(trainer("t", claims=("claim of t", "claim of nic")), claims=(halves, again))
    reason, text = wrong(
        PlacementPlanner(colocated_spec(replicas=1, request="half-0"), known).placement_for(0, 0)
    )
    assert (reason, text.endswith(": name their requests differently")) == ("AmbiguousClaim", True)


def test_a_pod_stays_in_its_place_and_leaves_it_for_another() -> None:
    spec = colocated_spec(replicas=2, tensor=8)
    both = beside(trainer("t-0"), trainer("t-1"))
    mine = pod_at(place(first_place(spec, both)))
    assert lost(spec, both, mine) is None
    unscheduled = replace(mine, node=None)
    assert lost(spec, both, unscheduled) is None
    first = beside(trainer("a"), trainer("t-0"), trainer("t-1"))
    waits = PlacementPlanner(spec, replace(first, stable_seconds=TRAINERS_SETTLED_SECONDS - 9))
    assert (waits.move_reason(mine), waits.moves_in) == (None, 9.0)
    assert lost(spec, first, mine) is None
    assert PlacementPlanner(spec, first).move_reason(mine) == (
        "its place is next to the trainer's pod 'a', with claim 'claim of a'"
    )
    moved = beside(trainer("t-0", node="elsewhere"), trainer("t-1"))
    text = "its claim 'claim of t-0' is on node 'elsewhere' now"
    assert lost(spec, moved, mine) == text
    assert lost(spec, moved, unscheduled) is None
    other = claim("t-0", devices=claim("x").devices)
    shared = beside(trainer("t-0"), trainer("t-1"), claims=(other, claim("t-1")))
    told = lost(spec, shared, mine)
    assert told is not None
    assert told.startswith("its share of claim 'claim of t-0' is gpu.example.com/node of x/gpu-0, ")


def test_a_pod_outlives_its_trainer_with_a_claim_that_stays() -> None:
    """While one is missing nobody knows which: nothing moves, and nothing is made."""
    spec = colocated_spec(replicas=2, tensor=8)
    mine = pod_at(place(first_place(spec, beside(trainer("t-0"), trainer("t-1")))))
    claims = (claim("t-0"), claim("t-1"))
    for trainers in ([trainer("t-1")], [trainer("t-0", node=None), trainer("t-1")], []):
        assert lost(spec, beside(*trainers, claims=claims), mine) is None
    going = beside(trainer("t-0", deleting=True), trainer("t-1"), claims=claims)
    assert lost(spec, going, mine) is None
    assert lost(spec, ObservedTrainers(), mine) is None, "nothing is known"
    renamed = beside(trainer("s-0", claims=("claim of t-0",)), trainer("t-1"), claims=claims)
    assert lost(spec, replace(renamed), replace(mine, node=None)) is None, "the same claim"


def test_a_pod_leaves_a_claim_at_once_that_no_trainer_uses() -> None:
    """Its trainer has come back with another claim, so the order of the others has nothing to do with it."""
    spec = colocated_spec(replicas=1, tensor=8)
    mine = pod_at(place(PlacementPlanner(spec, beside(trainer("t"))).placement_for(0, 0)))
    again = trainer("t", uid="another", claims=("claim of new",))
    now = replace(beside(again, claims=(claim("t"), claim("new"))), stable_seconds=0.0)
    assert PlacementPlanner(spec, now).lost_reason(mine) is None
    assert PlacementPlanner(spec, now).move_reason(mine) == (
        "its place is next to the trainer's pod 't', with claim 'claim of new'"
    )
    fewer = replace(now, has_shrunk=True)
    assert PlacementPlanner(spec, fewer).move_reason(mine) is None, "one may come back with it"


def test_a_pod_goes_with_the_claim_that_was_made_for_its_trainer() -> None:
    spec = colocated_spec(replicas=1, tensor=8)
    made = claim("t", pod_uid="uid of t")
    known = beside(trainer("t"), claims=(made,))
    mine = pod_at(place(first_place(spec, known)))
    assert lost(spec, known, mine) is None
    ends = beside(trainer("t", deleting=True), claims=(made,))
    assert lost(spec, ends, mine) == (
        "the trainer's pod 't' goes, and takes its claim 'claim of t' along"
    )
    going = beside(claims=(replace(made, deleting=True),))
    assert lost(spec, going, mine) == "its claim 'claim of t' is being deleted"
    assert lost(spec, beside(), mine) == "its claim is gone"
    again = beside(trainer("t"), claims=(replace(made, uid="another"),))
    assert lost(spec, again, mine) == "its claim is gone"


def test_of_two_pods_with_one_claim_the_older_is_the_trainers() -> None:
    spec = colocated_spec(replicas=2, tensor=8)
    first = trainer("t-0", created="2026-01-01T00:00:00Z")
    copy = replace(first, name="a", uid="copy", created="2026-01-02T00:00:00Z")
    found = PlacementPlanner(
        spec, beside(copy, first, trainer("t-1"), claims=(claim("t-0"), claim("t-1")))
    )
    assert [place(found.placement_for(i, 0)).trainer for i in range(2)] == ["t-0", "t-1"]
    assert [each.reason for each in found.strangers] == ["NoClaim"]
    going = replace(first, deleting=True)
    follows = beside(copy, going, trainer("t-1"), claims=(claim("t-0"), claim("t-1")))
    found = PlacementPlanner(spec, follows)
    assert place(found.placement_for(0, 0)).trainer == "a", "it takes the other one's place"
    assert not found.strangers


def test_a_trainer_has_shrunk_until_all_are_back_or_it_has_been_so_for_a_while() -> None:
    watch, (a, b, c) = TrainerWatch(), (trainer(name) for name in "abc")
    seen = [
        ([a, b, c], 0.0), ([b, c], 1.0), ([c], 2.0), ([replace(a, uid="again"), c], 3.0),
        ([a, replace(b, uid="again"), c], 4.0), ([a], 5.0), ([a], 64.0), ([a], 65.0),
    ]  # fmt: skip
    told = [(watch.note_trainers(there, now), watch.has_shrunk) for there, now in seen]
    assert [shrunk for _, shrunk in told] == [False, True, True, True, False, True, True, False]
    assert [seconds for seconds, _ in told] == [0, 0, 0, 0, 0, 0, 59, 60]


def test_an_extended_resource_makes_a_trainer_until_it_is_scheduled() -> None:
    def read(limit: str, **spec: Any) -> TrainerPod:
        made = {"containers": [{"resources": {"limits": {"cpu": 1, limit: 1}}}], **spec}
        found = parse_trainer({"metadata": META, "spec": made})
        assert found is not None
        return found

    for limit in ("nvidia.com/gpu", "deviceclass.resource.kubernetes.io/gpu"):
        assert read(limit).has_devices
        assert not read(limit, nodeName="n").has_devices, "then it would have a claim"
    for limit in ("memory", "hugepages-2Mi", "example.kubernetes.io/x"):
        assert not read(limit).has_devices


META = {"name": "t-0", "uid": "u", "labels": {"job": "grpo"}}


def test_a_trainers_claims_are_found_however_it_has_them() -> None:
    named = [{"name": "gpus", "resourceClaimName": "job-gpus-0"}]
    made = [{"name": "gpus", "resourceClaimTemplateName": "halves"}]
    told = {"resourceClaimStatuses": [{"name": "gpus", "resourceClaimName": "t-0-gpus-x"}]}
    extended = {"extendedResourceClaimStatus": {"resourceClaimName": "t-0-extended-y"}}
    on = {"nodeName": "n1"}

    def read(spec: dict[str, Any], status: dict[str, Any]) -> TrainerPod | None:
        return parse_trainer({"metadata": META, "spec": spec, "status": status})

    assert read({**on, "resourceClaims": named}, {}) == TrainerPod(
        "t-0", "u", node="n1", claims=("job-gpus-0",)
    )
    assert read({"resourceClaims": made}, {}) == TrainerPod("t-0", "u", unmade=("gpus",))
    assert read({"resourceClaims": made}, told) == TrainerPod("t-0", "u", claims=("t-0-gpus-x",))
    assert read(on, extended) == TrainerPod("t-0", "u", node="n1", claims=("t-0-extended-y",))
    none = {"resourceClaimStatuses": [{"name": "gpus"}]}
    assert read({"resourceClaims": made}, none) == TrainerPod("t-0", "u"), "none was needed"
    gone = {"metadata": {**META, "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert parse_trainer(gone) == TrainerPod("t-0", "u", deleting=True)


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_that_has_ended_is_no_trainer(phase: str) -> None:
    assert parse_trainer({"metadata": META, "status": {"phase": phase}}) is None


def test_a_rollout_pod_is_no_trainer_whatever_its_labels() -> None:
    labels = {"job": "grpo", "app.kubernetes.io/managed-by": "rollout-operator"}
    assert parse_trainer({"metadata": {**META, "labels": labels}}) is None


def test_a_claim_is_read_whole() -> None:
    result = {"request": "gpus", "driver": "gpu.example.com", "pool": "n1", "device": "gpu-0"}
    users = [
        {"resource": "pods", "name": "t-0", "uid": "t"},
        {"apiGroup": "x", "resource": "jobs", "name": "j", "uid": "j"},
    ]
    raw = {
        "metadata": {"name": "c", "uid": "u", "ownerReferences": [{"kind": "Pod", "uid": "t"}]},
        "spec": {"devices": {"requests": [{"name": "gpus", "exactly": {"count": 1}}]}},
        "status": {"allocation": {"devices": {"results": [result]}}, "reservedFor": users},
    }
    device = AllocatedDevice("gpus", "gpu.example.com", "n1", "gpu-0")
    assert device.name == "gpu.example.com/n1/gpu-0"
    assert parse_resource_claim(raw) == DeviceClaim(
        "c", "u", requests=("gpus",), allocated=True, devices=(device,), pod_uid="t", users=("t-0",)
    )
    bare = {"metadata": {"name": "c", "uid": "u"}, "spec": {}}
    assert parse_resource_claim(bare) == DeviceClaim("c", "u")


def test_pods_whose_claims_are_still_being_made_are_no_twins() -> None:
    """A template with one claim that all share, and one that is generated for each."""
    new = [trainer(f"t-{i}", claims=("shared",), unmade=("gpus",), node=None) for i in range(4)]
    found = PlacementPlanner(colocated_spec(replicas=4), beside(*new, claims=()))
    assert found.strangers == []
    assert "'t-3'" in why(found.placement_for(3, 0))
