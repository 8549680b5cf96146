"""The largest pictures that a request may have, whose decoding takes longer than a unit test may."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from rollout_common.wire import Multimodal
from rollout_common.wire.problems import ProblemError
from rollout_worker.pictures.picture import content_ref
from rollout_worker.pictures.picture_decoding import MAX_PIXELS, decode_picture
from rollout_worker.requests.part_preparation import PictureIntake


def largest(mode: str) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (2**13, MAX_PIXELS // 2**13)).save(file, "PNG")
    return file.getvalue()


def test_the_largest_picture_is_taken() -> None:
    assert decode_picture(largest("RGB")).nbytes == MAX_PIXELS * 3


async def test_the_pixels_of_a_request_are_bounded() -> None:
    data, intake = largest("1"), PictureIntake()
    sent = {"data": base64.b64encode(data).decode()}
    await intake.read_pictures(Multimodal.model_validate({"images": [sent, sent]}))
    named = {"ref": content_ref(data)}
    with pytest.raises(ProblemError, match="pixels together") as refused:
        await intake.read_pictures(Multimodal.model_validate({"images": [named] * 3}))
    assert refused.value.problem.status == 422
