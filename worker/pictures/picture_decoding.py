"""Decode a picture from base64, after cheap checks that bound what decoding takes; blocks, so call it in a thread.

Nothing of a picture is decoded before its header has told its size. A file of some kilobytes may otherwise
become gigabytes of pixels.
"""

from __future__ import annotations

import binascii
import io
import struct
import zlib
from typing import Any

from rollout_common.wire import MAX_IMAGE_BYTES

from .picture import Picture, content_ref

MAX_PIXELS = 2**25
"""Most pixels of one picture, 100 MB of colours; models scale them down to about one million."""
MAX_REQUEST_PIXELS = 2**26
"""Most pixels of all pictures of one request."""
MAX_JPEG_SCANS = 100
"""A progressive JPEG has about ten. Each scan is a pass over all pixels, and takes a few bytes of the file."""
JPEG_SCAN = b"\xff\xda"
"""Begins a scan; within the data of a scan these two bytes never follow each other."""
FORMATS = ("PNG", "JPEG")
"""What is decoded. Others would hold Python's lock while a whole picture is decoded, or are whole documents."""
SLICE_CHARACTERS = 2**20
"""Base64 that is decoded at once: a call of C holds Python's lock, for a millisecond."""

_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    struct.error,
    zlib.error,
)
"""What Pillow raises for damaged files, by no documented rule."""


class BadPicture(Exception):
    """This is not a picture that can be used; the text says why, and the fix."""


def decode_base64(text: str) -> bytes:
    """Return the bytes of strict base64, in slices.

    Raises:
        BadPicture: It is not base64, or it is of more than `MAX_IMAGE_BYTES`.
    """
    pieces = []
    for start in range(0, len(text), SLICE_CHARACTERS):
        part = text[start : start + SLICE_CHARACTERS]
        last = start + SLICE_CHARACTERS >= len(text)
        try:
            piece = binascii.a2b_base64(part, strict_mode=True)
        except ValueError:  # binascii.Error, or characters beyond ASCII
            piece = b""
        if not piece or len(part) % 4 or (not last and len(piece) * 4 != len(part) * 3):
            raise BadPicture(
                "is not base64: encode the picture's bytes with the standard alphabet, padded"
            )
        pieces.append(piece)
    data = b"".join(pieces)
    if len(data) > MAX_IMAGE_BYTES:
        raise BadPicture(
            f"has {len(data)} bytes, at most {MAX_IMAGE_BYTES} are taken: encode it smaller"
        )
    return data


def decode_picture(data: bytes) -> Picture:
    """Return the picture that these encoded bytes are, turned as its camera says.

    Raises:
        BadPicture: They are not one whole picture of a known format and a size that is taken.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_header(image, data)
            image.load()
            colours = _drop_alpha(ImageOps.exif_transpose(image))
    except Image.UnidentifiedImageError:
        raise BadPicture(
            "is neither PNG nor JPEG, or broken: encode the picture as one of these"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError):
        raise BadPicture(_too_large("more")) from None
    except _BROKEN as error:
        raise BadPicture(f"cannot be decoded ({error}): send the whole file, undamaged") from None
    return Picture(content_ref(data), colours.width, colours.height, colours.tobytes())


def _check_header(image: Any, data: bytes) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadPicture(_too_large(f"{width} x {height}"))
    if image.format == "PNG":
        if getattr(image, "n_frames", 1) > 1:
            raise BadPicture("is animated: send one of its frames")
    # Cameras append previews to a JPEG: of those only the picture itself is read.
    elif data.count(JPEG_SCAN) > MAX_JPEG_SCANS:
        raise BadPicture(f"has more than {MAX_JPEG_SCANS} scans: encode the picture again")


def _drop_alpha(image: Any) -> Any:
    """Return a picture in red, green and blue; transparency is dropped, as transformers' `load_image` does."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _too_large(size: str) -> str:
    return f"has {size} pixels, at most {MAX_PIXELS} are taken: scale it down"
