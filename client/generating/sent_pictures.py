"""Pictures of requests: their bytes go to each worker once, after that their hashes do.

A request keeps the hashes, so that it can be continued on any worker. Which worker has which picture is an assumption: a
worker forgets those that it has not used for long, and says so with 409 `unknown-media`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from rollout_common.wire import (
    MAX_IMAGE_BYTES,
    MAX_IMAGE_REQUEST_BYTES,
    GenerateRequest,
    ImageInput,
    Multimodal,
)

from .settings import OTHERS_WAIT_SECONDS

UNKNOWN_MEDIA = "unknown-media"
"""Slug of a worker that lacks pictures."""
REMEMBERED_PICTURES = 2**16
"""Pairs of worker and picture: beyond them a picture is sent once more."""

Images = Sequence[bytes]
"""Encoded pictures, PNG or JPEG."""


def image_inputs(images: Images) -> dict[str, object]:
    """Return `multimodal` for these encoded pictures.

    Raises:
        TypeError: One of them is not bytes.
        ValueError: They are too large.
    """
    if isinstance(images, bytes | bytearray | memoryview):
        raise TypeError("images is a list of encoded pictures: write [data], also for one")
    found = []
    for index, image in enumerate(images):
        if not isinstance(image, bytes | bytearray | memoryview):
            raise TypeError(
                f"images[{index}] is a {type(image).__name__}, not the bytes of a PNG or JPEG: "
                "encode it, such as by image.save(file, 'PNG')"
            )
        if len(image) > MAX_IMAGE_BYTES:
            raise ValueError(
                f"images[{index}] has {len(image)} bytes, at most {MAX_IMAGE_BYTES} are taken"
            )
        found.append({"data": base64.b64encode(image).decode()})
    if sum(map(len, images)) > MAX_IMAGE_REQUEST_BYTES:
        raise ValueError(f"the images have more than {MAX_IMAGE_REQUEST_BYTES} bytes together")
    return {"images": found}


def split_pictures(request: GenerateRequest) -> tuple[GenerateRequest, dict[str, str]]:
    """Return a request with hashes in place of bytes, and the bytes in base64 by hash."""
    if request.multimodal is None:
        return request, {}
    encoded: dict[str, str] = {}
    images = []
    for image in request.multimodal.images:
        if image.data is not None:
            with contextlib.suppress(ValueError):  # the worker says what is wrong with it
                data = base64.b64decode(image.data, validate=True)
                ref = "sha256:" + hashlib.sha256(data).hexdigest()
                encoded[ref] = image.data
                image = ImageInput(ref=ref)
        images.append(image)
    named = Multimodal(images=tuple(images))
    return request.model_copy(update={"multimodal": named}), encoded


def with_picture_data(request: GenerateRequest, encoded: Mapping[str, str]) -> GenerateRequest:
    """Return a request in which these pictures have their bytes, each once."""
    if request.multimodal is None or not encoded:
        return request
    left = dict(encoded)
    images = [
        ImageInput(data=left.pop(image.ref)) if image.ref in left else image
        for image in request.multimodal.images
    ]
    return request.model_copy(update={"multimodal": Multimodal(images=tuple(images))})


class PictureClaim(NamedTuple):
    """What one attempt sends.

    `missing`: the hashes whose bytes the worker is thought to lack; `note_taken`: notes that the worker has taken
    the request, hence has the pictures.
    """

    missing: frozenset[str]
    note_taken: Callable[[], None]


class SentPictures:
    """Which worker was sent which pictures; one for all requests of a pool, in one event loop."""

    def __init__(self, most: int = REMEMBERED_PICTURES) -> None:
        self._most = most
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._sending: dict[tuple[str, str], asyncio.Event] = {}

    @contextlib.asynccontextmanager
    async def claim_pictures(
        self, url: str, refs: Collection[str], seconds: float, *, again: bool = False
    ) -> AsyncIterator[PictureClaim]:
        """Decide which of these pictures an attempt sends, and let other attempts with the same ones wait for it.

        `seconds` are what the request has left, half of which it waits for others at the most. `again`: send all of
        them, because the worker has lost some.
        """
        missing = frozenset(refs)
        if refs and not again:
            await self._wait_for_others(url, refs, min(OTHERS_WAIT_SECONDS, seconds / 2))
            missing = frozenset(ref for ref in refs if not self._knows_picture(url, ref))
        mine = {ref: asyncio.Event() for ref in missing if (url, ref) not in self._sending}
        self._sending |= {(url, ref): event for ref, event in mine.items()}

        def end_sending() -> None:
            for ref, event in mine.items():
                if self._sending.get((url, ref)) is event:
                    del self._sending[url, ref]
                event.set()

        def note_taken() -> None:
            self._remember_pictures(url, missing)
            end_sending()

        try:
            yield PictureClaim(missing, note_taken)
        finally:
            end_sending()

    async def _wait_for_others(self, url: str, refs: Iterable[str], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while others := [
                    self._sending[url, ref] for ref in refs if (url, ref) in self._sending
                ]:
                    await others[0].wait()

    def _knows_picture(self, url: str, ref: str) -> bool:
        if (url, ref) not in self._known:
            return False
        self._known.move_to_end((url, ref))
        return True

    def _remember_pictures(self, url: str, refs: Iterable[str]) -> None:
        for ref in refs:
            self._known[url, ref] = None
            self._known.move_to_end((url, ref))
        while len(self._known) > self._most:
            self._known.popitem(last=False)
