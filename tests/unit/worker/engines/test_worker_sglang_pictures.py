"""Pictures on their way to SGLang's child: what the worker leaves out, the child has."""

from __future__ import annotations

import base64
import random
from functools import partial
from itertools import pairwise

import pytest

from rollout_worker.engine import EngineRequest, WeightsLayout
from rollout_worker.engines.picture_model import PictureModel, PlacedPicture
from rollout_worker.engines.picture_positions import grid_positions
from rollout_worker.engines.recent_values import RecentValues
from rollout_worker.engines.request_checks import StopChecker
from rollout_worker.engines.sglang.model import SglangModel
from rollout_worker.engines.sglang.scheduling import SentPixels
from rollout_worker.engines.sglang.sglang_streams import SglangStream
from rollout_worker.pictures.picture import Picture, content_ref
from rollout_worker.schemas import SamplingParams, WeightsId


def picture(number: int, side: int = 2) -> Picture:
    return Picture(content_ref(bytes([number])), side, side, bytes([number]) * 3 * side * side)


def test_pixels_are_sent_once_and_before_the_request() -> None:
    sent = SentPixels()
    assert list(sent.commands_for([])) == []
    one, two = picture(1), picture(2)
    first = list(sent.commands_for([one, two, one]))
    assert [op for op, _ in first] == ["use_pictures", "keep_picture", "keep_picture"]
    assert base64.b64decode(first[1][1]["pixels"]) == one.pixels
    again = list(sent.commands_for([two]))
    assert again == [("use_pictures", {"refs": [two.ref]})]


@pytest.mark.parametrize("seed", range(20))
def test_the_child_never_lacks_a_picture(seed: int) -> None:
    """Both ends keep the same, whatever is asked in whatever order, though only some fit."""
    rng = random.Random(seed)
    sent = SentPixels(3 * 40)
    child = RecentValues[str, bytes](3 * 40, len)
    made = [picture(number, rng.randint(2, 3)) for number in range(12)]
    brought = 0
    for _ in range(200):
        wanted = rng.sample(made, rng.randint(1, 4))  # at most 36 pixels: a request always fits
        for op, args in sent.commands_for(wanted):
            if op == "use_pictures":
                child.use_values(args["refs"])
            else:
                child.find_or_make(args["ref"], partial(base64.b64decode, args["pixels"]))
                brought += 1
        for each in wanted:
            assert child.value_of(each.ref) == each.pixels
    assert brought > 12, "some were dropped and sent again"


def model() -> PictureModel:
    return PictureModel(9, frozenset({9, 8}), lambda height, width: 2, apart=True, processor=None)


def test_the_childs_request_has_places_and_bans() -> None:
    one = picture(1)
    request = EngineRequest("r", (5, 9, 9, 6), SamplingParams(max_tokens=2), "raw", pictures=(one,))
    served = SglangModel(
        None, WeightsLayout({}, {}, {}), frozenset(), 64, 10, "float32", {}, pictures=model()
    )
    stream = SglangStream(request, 0, served, StopChecker(request.sampling, frozenset(), None))
    made = stream.begin_request("0", WeightsId(epoch=1, version=2), 0)
    assert made["pictures"] == [(one.ref, 1, 2)]
    assert made["sampling_params"]["custom_params"]["never"] == [8, 9]
    assert made["input_ids"] == [5, 9, 9, 6]


def test_positions_follow_the_longest_side() -> None:
    placed = [PlacedPicture(picture(1), 2, 6), PlacedPicture(picture(2), 10, 4)]
    found, shift = grid_positions(16, placed, [(1, 4, 6), (1, 8, 2)], 2)
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 7, 7, 7, 11, 12],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10, 11, 12],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 7, 7, 7, 11, 12],
    ]
    assert shift == 13 - 16
    text, none = grid_positions(3, [], [], 2)
    assert (text.tolist(), none) == ([[0, 1, 2]] * 3, 0)
    assert all(a <= b for a, b in pairwise(found[0].tolist()))
