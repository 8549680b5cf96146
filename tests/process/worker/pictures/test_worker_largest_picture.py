"""The largest picture that a request may have, whose decoding takes longer than a unit test may."""

from __future__ import annotations

import io

from PIL import Image

from rollout_worker.pictures.picture_decoding import MAX_PIXELS, decode_picture


def test_the_largest_picture_is_taken() -> None:
    file = io.BytesIO()
    Image.new("RGB", (2**13, MAX_PIXELS // 2**13)).save(file, "PNG")
    assert decode_picture(file.getvalue()).nbytes == MAX_PIXELS * 3
