"""Wire models of pictures: a prompt's images, each as its bytes or by the hash of bytes that the worker has."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from .wire_base import Body, bounded_length

__all__ = ["MAX_IMAGES", "MAX_IMAGE_BYTES", "MAX_IMAGE_REQUEST_BYTES", "ImageInput", "Multimodal"]

MAX_IMAGES = 64
"""Most pictures of one request."""
MAX_IMAGE_BYTES = 16 * 2**20
"""Most bytes of one encoded picture: a photograph of 33 million pixels."""
MAX_IMAGE_REQUEST_BYTES = 48 * 2**20
"""Most bytes of all encoded pictures that one request carries; those by `ref` carry none."""
MAX_IMAGE_TEXT = -(-MAX_IMAGE_BYTES // 3) * 4
"""The same for one picture in base64."""

ImageData = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_IMAGE_TEXT)]
ImageRef = Annotated[str, Field(strict=True, pattern=r"^sha256:[0-9a-f]{64}$")]


class ImageInput(Body):
    """One picture: either its encoded bytes, or the hash of bytes that this worker has been sent before."""

    data: ImageData | None = Field(
        default=None, description="An encoded picture (PNG or JPEG) in base64."
    )
    ref: ImageRef | None = Field(
        default=None, description="`sha256:` and the hash of the encoded bytes, in hexadecimal."
    )

    @model_validator(mode="after")
    def _name_one(self) -> Self:
        if (self.data is None) == (self.ref is None):
            raise ValueError("must have either data or ref: the bytes, or the hash of known ones")
        return self


class Multimodal(Body):
    """What a prompt has besides text: the pictures of its placeholders, in the order of these."""

    images: Annotated[
        tuple[ImageInput, ...],
        Field(min_length=1, max_length=MAX_IMAGES, fail_fast=True),
        bounded_length(MAX_IMAGES),
    ]
