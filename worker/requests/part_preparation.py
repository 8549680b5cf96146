"""Make what takes time of a request before it is admitted: check its grammar, decode its pictures.

Pictures are decoded in one thread, one after the other, so that however many requests come at once, the event
loop has its turn and few pictures are in memory twice.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollout_common.wire import GenerateRequest, ImageInput, Multimodal, StructuredOutput
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import Engine, EngineError, EngineInfo, Grammar, InvalidRequest
from rollout_worker.engines.grammars.grammar_checker import GrammarChecker
from rollout_worker.pictures.picture import Picture, PictureStore, content_ref
from rollout_worker.pictures.picture_decoding import (
    MAX_REQUEST_PIXELS,
    BadPicture,
    decode_base64,
    decode_picture,
)

from .admission_checks import PreparedParts, check_pictures_taken, invalid_problem
from .settings import PICTURES_TIMEOUT_SECONDS

WAITING_TEXT = 256 * 2**20
"""Characters of base64 that may wait to be decoded, of all requests together."""


class PartPreparation:
    """Prepares the parts of one worker's requests; `folder` returns that of the loaded model."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._grammars = GrammarChecker(folder)
        self._pictures = PictureIntake()

    async def prepare_parts(
        self, request: GenerateRequest, engine: Engine, info: EngineInfo
    ) -> PreparedParts:
        """Check the grammar of a request and decode its pictures, within its deadline.

        Raises:
            ProblemError: 4xx, 503 or 504; it names the field and the fix. 409 `unknown-media` names the hashes
                of pictures that have to be sent.
        """
        try:
            async with asyncio.timeout(request.deadline_seconds):
                grammar = await self._check_grammar(request.structured, engine, info)
                pictures = await self._read_pictures(request.multimodal, engine)
        except TimeoutError:
            raise ProblemError(
                "deadline-exceeded",
                f"grammar and pictures were not ready within {request.deadline_seconds:g} s, behind those of other"
                " requests: try again, or set a longer deadline_seconds",
                retry_after=1,
            ) from None
        except InvalidRequest as error:
            raise invalid_problem(error) from error
        return PreparedParts(grammar, pictures)

    async def _check_grammar(
        self, structured: StructuredOutput | None, engine: Engine, info: EngineInfo
    ) -> Grammar | None:
        if structured is None:
            return None
        if not engine.capabilities.structured:
            text = (
                f"the {info.engine} engine can't mask tokens for this model: leave it out, or add a tokenizer.json"
                " and an eos_token_id to the model's folder"
            )
            raise InvalidRequest("structured", text)
        try:
            return await self._grammars.check_structured(structured, info.eos_token_ids)
        except InvalidRequest:
            raise
        except EngineError as error:
            raise ProblemError("internal-error", f"structured: {error}") from error

    async def _read_pictures(
        self, multimodal: Multimodal | None, engine: Engine
    ) -> tuple[Picture, ...]:
        if multimodal is None:
            return ()
        check_pictures_taken(engine.capabilities)
        pictures = await self._pictures.read_pictures(multimodal)
        await engine.prepare_pictures(pictures)
        return pictures

    async def stop(self) -> None:
        """End the process that checks grammars."""
        await self._grammars.stop()


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
                raise _refused_images(
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
            raise _refused_images(str(error), f".{index}.data") from None


def _refused_images(detail: str, where: str = "") -> ProblemError:
    """Return the 422 for pictures, which names the field: `where` follows `multimodal.images`."""
    field = f"multimodal.images{where}"
    errors = [{"field": field, "message": detail}]
    return ProblemError("invalid-request", f"{field}: {detail}", errors=errors)
