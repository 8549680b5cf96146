"""Get the pictures of a request before it is submitted: decode those that it brings, find those that it names.

Decoding runs in one thread, one picture after the other, so that however many requests come at once, the event
loop has its turn and few pictures are in memory twice.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rollout_common.wire import ImageInput, Multimodal
from rollout_common.wire.problems import ProblemError
from rollout_worker.pictures.picture import Picture, content_ref
from rollout_worker.pictures.picture_decoding import (
    MAX_REQUEST_PIXELS,
    BadPicture,
    decode_base64,
    decode_picture,
)
from rollout_worker.pictures.picture_store import PictureStore

from .settings import PICTURES_TIMEOUT_SECONDS

WAITING_TEXT = 256 * 2**20
"""Characters of base64 that may wait to be decoded, of all requests together."""


class PictureIntake:
    """The pictures of one worker's requests."""

    def __init__(self, store: PictureStore | None = None) -> None:
        self.store = PictureStore() if store is None else store
        self._thread = ThreadPoolExecutor(1, "pictures")
        self._waiting = 0

    async def read_pictures(self, given: Multimodal) -> tuple[Picture, ...]:
        """Return the pictures, in order.

        Raises:
            ProblemError: 422 that names the picture and the fix, 409 `unknown-media` with the hashes whose bytes
                have to be sent, 429, or 504.
        """
        text = sum(len(each.data) for each in given.images if each.data is not None)
        if self._waiting + text > WAITING_TEXT:
            raise ProblemError(
                "queue-full", "too many pictures arrive at once: try again", retry_after=1
            )
        self._waiting += text
        given_up = threading.Event()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PICTURES_TIMEOUT_SECONDS):
                return await loop.run_in_executor(
                    self._thread, self._collect_pictures, given.images, given_up
                )
        except TimeoutError:
            raise ProblemError(
                "deadline-exceeded",
                f"the pictures were not decoded within {PICTURES_TIMEOUT_SECONDS:g} s: try again",
            ) from None
        finally:
            given_up.set()
            self._waiting -= text

    def _collect_pictures(
        self, images: Sequence[ImageInput], given_up: threading.Event
    ) -> tuple[Picture, ...]:
        found: list[Picture | None] = []
        pixels = 0
        for index, image in enumerate(images):
            if given_up.is_set():
                break
            picture = self._take_picture(index, image)
            found.append(picture)
            pixels += 0 if picture is None else picture.width * picture.height
            if pixels > MAX_REQUEST_PIXELS:
                raise refused_images(
                    f"the pictures have more than {MAX_REQUEST_PIXELS} pixels together: scale them"
                    " down, or send fewer in one request"
                )
        unknown = [
            image.ref
            for image, picture in zip(images, found, strict=False)
            if picture is None and image.ref is not None
        ]
        if unknown:
            raise ProblemError(
                "unknown-media",
                f"{len(unknown)} of the pictures are not here (any more), the first is"
                f" {unknown[0]}: send their bytes as `data`",
                refs=unknown,
            )
        return tuple(each for each in found if each is not None)

    def _take_picture(self, index: int, image: ImageInput) -> Picture | None:
        """Return a picture; None: it is named by a hash that is not known."""
        if image.data is None:
            return self.store.find_picture(image.ref or "")
        if self.store.is_full:
            raise ProblemError(
                "queue-full",
                "the pictures of requests in flight fill the memory: try again, or use another"
                " replica",
                retry_after=1,
            )
        try:
            data = decode_base64(image.data)
            known = self.store.find_picture(content_ref(data))
            return known or self.store.keep_picture(decode_picture(data))
        except BadPicture as error:
            raise refused_images(str(error), f".{index}.data") from None


def refused_images(detail: str, where: str = "") -> ProblemError:
    """Return the 422 for pictures, which names the field: `where` follows `multimodal.images`."""
    field = f"multimodal.images{where}"
    errors = [{"field": field, "message": detail}]
    return ProblemError("invalid-request", f"{field}: {detail}", errors=errors)
