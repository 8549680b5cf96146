"""A decoded picture and its name, the hash of its bytes; and the pictures that a worker has been sent, by that name."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

REF_PREFIX = "sha256:"
STORE_BYTES = 256 * 2**20
"""Some hundred pictures of a million pixels: what the groups of a few steps ask about."""
MEMORY_BYTES = 1024 * 2**20
"""What the pictures of requests in flight may take in addition: a queue of long requests must not fill the memory."""


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


class PictureStore:
    """Decoded pictures by `ref`, as many as fit; the least recently used go first. Safe to use from several threads.

    A picture that a request in flight has is found, too, however long ago it was sent.

    Args:
        most: Bytes of pixels that it keeps. One picture that is larger is not kept.
        most_in_use: Bytes of all pictures in memory, of requests in flight as well, from which on it is full.
    """

    def __init__(
        self, most: int = STORE_BYTES, most_in_use: int = STORE_BYTES + MEMORY_BYTES
    ) -> None:
        self._most, self._most_in_use = most, most_in_use
        self._kept: OrderedDict[str, Picture] = OrderedDict()
        self._known: WeakValueDictionary[str, Picture] = WeakValueDictionary()
        self._lock = threading.Lock()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_full(self) -> bool:
        """Whether requests in flight have so many pictures that no more should be decoded."""
        with self._lock:
            return sum(each.nbytes for each in self._known.values()) >= self._most_in_use

    def find_picture(self, ref: str) -> Picture | None:
        """Return the picture of this hash, which counts as a use, or None."""
        with self._lock:
            found = self._known.get(ref)
            if found is not None:
                self._keep(found)
            return found

    def keep_picture(self, picture: Picture) -> Picture:
        """Keep a picture, and drop those that were not used for the longest time; return the one of this hash."""
        with self._lock:
            picture = self._known.setdefault(picture.ref, picture)
            self._keep(picture)
            return picture

    def _keep(self, picture: Picture) -> None:
        if picture.nbytes > self._most:
            return
        if picture.ref not in self._kept:
            self._kept[picture.ref] = picture
            self.nbytes += picture.nbytes
        self._kept.move_to_end(picture.ref)
        while self.nbytes > self._most:
            _, dropped = self._kept.popitem(last=False)
            self.nbytes -= dropped.nbytes
