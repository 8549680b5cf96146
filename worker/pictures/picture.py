"""A decoded picture, and its name: the hash of the bytes that it was decoded from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

REF_PREFIX = "sha256:"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Picture:
    """One picture, upright and in colour.

    `ref`: `sha256:` and the hash of its encoded bytes; computed here, never taken from a caller, since engines trust
    it: two pictures of one name would be one to them. `pixels`: [height, width, 3] uint8, red, green and blue.
    """

    ref: str
    width: int
    height: int
    pixels: bytes

    @property
    def nbytes(self) -> int:
        """Size of its pixels."""
        return len(self.pixels)

    def to_image(self) -> Any:
        """Return it as a `PIL.Image.Image`."""
        from PIL import Image

        return Image.frombytes("RGB", (self.width, self.height), self.pixels)


def content_ref(data: bytes) -> str:
    """Return the `ref` of a picture's encoded bytes."""
    return REF_PREFIX + hashlib.sha256(data).hexdigest()
