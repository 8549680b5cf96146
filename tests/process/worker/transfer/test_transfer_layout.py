"""Where each tensor of a pushed version lies: any plan is sound, and no other one is believed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_common.transfer.layout import ALIGN, ITEM_BYTES, LayoutError, PushLayout
from rollout_worker.weights import PushLayout as from_weights

NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=900), min_size=1, max_size=12).filter(
    str.isprintable
)
SPECS = st.dictionaries(
    NAMES,
    st.tuples(
        st.sampled_from(sorted(ITEM_BYTES)),
        st.lists(st.integers(0, 40), max_size=4).map(tuple),
    ),
    max_size=12,
)


def planned(specs: dict[str, tuple[str, tuple[int, ...]]]) -> PushLayout:
    return PushLayout.plan((name, *spec) for name, spec in specs.items())


@given(SPECS)
def test_every_tensor_has_a_place_of_its_own_in_the_order_in_which_they_are_given(
    specs: dict[str, Any],
) -> None:
    layout = planned(specs)
    assert [each.name for each in layout.tensors] == sorted(specs)
    end = 0
    for name, (dtype, shape) in specs.items():
        each = layout[name]
        assert (each.name, each.dtype, each.shape) == (name, dtype, shape)
        assert each.nbytes == ITEM_BYTES[dtype] * math.prod(shape)
        assert each.start % ALIGN == 0
        assert 0 <= each.start - end < ALIGN
        end = each.end
    assert 0 <= layout.nbytes - end < ALIGN


@given(SPECS, st.randoms())
def test_another_order_of_tensors_is_another_plan_unless_all_lie_where_they_did(
    specs: dict[str, Any], random: Any
) -> None:
    names = list(specs)
    random.shuffle(names)
    first, second = planned(specs), planned({name: specs[name] for name in names})
    same = [each.start for each in first.tensors] == [each.start for each in second.tensors]
    assert (first.layout_id == second.layout_id) is same
    assert first.nbytes == second.nbytes


@given(SPECS)
def test_a_plan_survives_the_wire(specs: dict[str, Any]) -> None:
    layout = planned(specs)
    assert PushLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@given(SPECS.filter(bool), st.data())
def test_any_change_makes_another_id(specs: dict[str, Any], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(specs)))
    dtype, shape = specs[name]
    changes: list[dict[str, Any]] = [
        {**specs, name: ("U8" if dtype != "U8" else "I8", shape)},
        {**specs, name: (dtype, (*shape, 1))},
        {each: spec for each, spec in specs.items() if each != name},
        {**specs, f"{name}!": (dtype, shape)},
    ]
    ids = {planned(change).layout_id for change in changes}
    assert planned(specs).layout_id not in ids


@given(SPECS.filter(bool), st.data())
def test_a_tampered_plan_is_refused(specs: dict[str, Any], data: st.DataObject) -> None:
    body = json.loads(json.dumps(planned(specs).to_json()))
    row = data.draw(st.sampled_from(body["tensors"]))
    match data.draw(st.sampled_from(["start", "size", "dtype", "name", "shape", "total", "id"])):
        case "start":
            row[3] += data.draw(st.sampled_from([1, ALIGN, -ALIGN, ALIGN // 2]))
        case "size":
            row[2] = [*row[2], 3] if 0 not in row[2] else [5]
        case "dtype":
            row[1] = "F128"
        case "name":
            row[0] += "x"
        case "shape":
            row[2] = [-1]
        case "total":
            body["bytes"] += ALIGN
        case "id":
            body["layout_id"] = "xxh3_128:" + "0" * 32
    with pytest.raises(LayoutError):
        PushLayout.from_json(body)


def test_two_tensors_of_one_name_are_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="'a' came twice") as caught:
        PushLayout.plan([("a", "U8", (1,)), ("a", "U8", (1,))])
    assert caught.value.tensor == "a"


@pytest.mark.parametrize(
    "row",
    [
        ["a", "U8", [1]],
        ["", "U8", [1], 0],
        ["a\n", "U8", [1], 0],
        ["\ud800", "U8", [1], 0],
        ["a", None, [1], 0],
        ["a", "U8", [True], 0],
        ["a", "U8", ["1"], 0],
        ["a", "U8", [1], None],
        ["a", "U8", [2**62, 2**62], 0],
        ["a", "U8", [1] * 33, 0],
        "a",
        None,
    ],
)
def test_what_is_no_tensor_is_refused(row: object) -> None:
    with pytest.raises(LayoutError):
        PushLayout.from_json({"layout_id": "", "bytes": ALIGN, "tensors": [row]})


@pytest.mark.parametrize("body", [None, [], {}, {"tensors": None}, {"tensors": []}, "x"])
def test_what_is_no_layout_is_refused(body: object) -> None:
    with pytest.raises(LayoutError):
        PushLayout.from_json(body)


def test_overlaps_are_refused_by_name() -> None:
    layout = PushLayout.plan([("a", "U8", (ALIGN + 1,)), ("b", "U8", (1,))])
    body = layout.to_json()
    body["tensors"][1][3] = ALIGN
    with pytest.raises(LayoutError, match="'b' overlaps"):
        PushLayout.from_json(body)


def test_what_no_machine_holds_is_refused() -> None:
    with pytest.raises(LayoutError, match="check its shape"):
        PushLayout.plan([("a", "F32", (2**47,))])
    with pytest.raises(LayoutError, match="more than any worker"):
        PushLayout.plan([(name, "U8", (2**48,)) for name in "ab"])


def test_a_name_that_is_not_there_is_a_key_error() -> None:
    layout = PushLayout.plan([("a", "U8", ()), ("c", "U8", (0,))])
    for name in ("", "b", "d"):
        with pytest.raises(KeyError):
            layout[name]


def test_the_weights_module_offers_it_too() -> None:
    assert from_weights is PushLayout
