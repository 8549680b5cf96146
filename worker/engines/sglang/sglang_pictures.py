"""The worker's side of pictures: which ones the child has, and the commands that bring the others.

Child and worker keep the same list, by the same rule and in the same order of commands, so the worker knows without
asking what the child has dropped.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from rollout_worker.engines.picture_model import PlacedPicture
from rollout_worker.pictures.picture import Picture
from rollout_worker.pictures.picture_decoding import MAX_REQUEST_PIXELS

KEPT_PIXELS = 4 * MAX_REQUEST_PIXELS
"""Pixels of pictures that the child keeps, of 3 bytes each: more than one request may have, whose own stay."""

V = TypeVar("V")


class KeptPictures(Generic[V]):
    """Values of pictures by `ref`, up to a number of pixels; the least recently used go first."""

    def __init__(self, most: int = KEPT_PIXELS) -> None:
        self._most = most
        self._kept: OrderedDict[str, tuple[int, V]] = OrderedDict()
        self._pixels = 0

    def use_pictures(self, refs: Iterable[str]) -> set[str]:
        """Mark pictures as used; return those that are not kept."""
        missing = set()
        for ref in refs:
            if ref in self._kept:
                self._kept.move_to_end(ref)
            else:
                missing.add(ref)
        return missing

    def keep_picture(self, ref: str, pixels: int, value: V) -> None:
        """Keep the value of a picture that is not kept, and drop others for it."""
        self._kept[ref] = pixels, value
        self._pixels += pixels
        while self._pixels > self._most:
            self._pixels -= self._kept.popitem(last=False)[1][0]

    def value_of(self, ref: str) -> V:
        """Return the value of a picture that is kept."""
        return self._kept[ref][1]


class SentPixels:
    """What one child was sent."""

    def __init__(self) -> None:
        self._kept = KeptPictures[None]()

    def commands_for(self, pictures: Sequence[Picture]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the commands, (name, arguments), that come before a request with these pictures."""
        if not pictures:
            return
        by_ref = {each.ref: each for each in pictures}
        missing = self._kept.use_pictures(by_ref)
        yield "use_pictures", {"refs": list(by_ref)}
        for ref, each in by_ref.items():
            if ref not in missing:
                continue
            self._kept.keep_picture(ref, each.width * each.height, None)
            yield (
                "keep_picture",
                {
                    "ref": ref,
                    "width": each.width,
                    "height": each.height,
                    "pixels": base64.b64encode(each.pixels).decode(),
                },
            )


def placed_fields(placed: Sequence[PlacedPicture]) -> list[list[Any]]:
    """Return `[ref, offset, length]` of each picture, as the child's request has them."""
    return [[each.picture.ref, each.offset, each.length] for each in placed]
