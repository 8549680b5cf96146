"""The worker's side of pictures: which ones the child has, and the commands that bring the others.

Child and worker keep the same list, by the same rule and in the same order of commands, so the worker knows without
asking what the child has dropped.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from rollout_worker.engines.picture_model import PlacedPicture
from rollout_worker.engines.recent_values import RecentValues
from rollout_worker.pictures.picture import Picture
from rollout_worker.pictures.picture_decoding import MAX_REQUEST_PIXELS

KEPT_BYTES = 4 * 3 * MAX_REQUEST_PIXELS
"""Of pictures that the child keeps, of 3 bytes a pixel: more than one request may have, whose own stay."""


class SentPixels:
    """What one child was sent and keeps, up to `most` bytes."""

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._kept = RecentValues[str, int](most, lambda nbytes: nbytes)

    def commands_for(self, pictures: Sequence[Picture]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the commands, (name, arguments), that come before a request with these pictures."""
        if not pictures:
            return
        by_ref = {each.ref: each for each in pictures}
        missing = self._kept.use_values(by_ref)
        yield "use_pictures", {"refs": list(by_ref)}
        for ref, each in by_ref.items():
            if ref not in missing:
                continue
            self._kept.find_or_make(ref, partial(len, each.pixels))
            pixels = base64.b64encode(each.pixels).decode()
            sent = {"ref": ref, "width": each.width, "height": each.height, "pixels": pixels}
            yield "keep_picture", sent


def placed_fields(placed: Sequence[PlacedPicture]) -> list[list[Any]]:
    """Return `[ref, offset, length]` of each picture, as the child's request has them."""
    return [[each.picture.ref, each.offset, each.length] for each in placed]
