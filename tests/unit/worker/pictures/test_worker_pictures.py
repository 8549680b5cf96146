"""Pictures as a worker takes them: every file that a caller may send, and the store that keeps them."""

from __future__ import annotations

import base64
import gc
import hashlib
import io
import random
import struct
import time
import zlib
from collections.abc import Callable

import pytest
from PIL import Image

from rollout_worker.pictures.picture import Picture, PictureStore, content_ref
from rollout_worker.pictures.picture_decoding import (
    MAX_JPEG_SCANS,
    SLICE_CHARACTERS,
    BadPicture,
    decode_base64,
    decode_picture,
)
from rollout_worker.schemas import MAX_IMAGE_BYTES


def encode(image: Image.Image, kind: str = "PNG", **more: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    data = random.Random(seed).randbytes(width * height * 3)
    return Image.frombytes("RGB", (width, height), data)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of_size(width: int, height: int, pixels: bytes = b"") -> bytes:
    """A PNG whose header has this size, whatever its pixels are."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(pixels)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16", "CMYK"])
def test_pictures_of_every_mode_become_colours(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    source = noise(7, 5).convert("RGB").convert("L" if mode == "I;16" else mode)
    data = encode(source.convert(mode) if mode == "I;16" else source, kind)
    found = decode_picture(data)
    assert (found.width, found.height, found.nbytes) == (7, 5, 7 * 5 * 3)
    assert found.ref == "sha256:" + hashlib.sha256(data).hexdigest()
    assert found.to_image().tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_a_palette_with_transparency_is_taken() -> None:
    data = encode(noise(8, 8).quantize(16), transparency=bytes(range(16)))
    assert decode_picture(data).nbytes == 8 * 8 * 3


def test_a_picture_is_turned_as_its_camera_says() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    found = decode_picture(encode(noise(20, 10), "JPEG", exif=turned))
    assert (found.width, found.height) == (10, 20)


def test_a_preview_behind_a_jpeg_is_no_second_picture() -> None:
    data = encode(noise(16, 16), "MPO", save_all=True, append_images=[noise(8, 8)])
    assert decode_picture(data).width == 16


def scans(count: int) -> bytes:
    """A progressive JPEG with so many scans more than Pillow writes."""
    whole = encode(noise(16, 16), "JPEG", progressive=True)
    first = whole.index(b"\xff\xda")
    second = whole.index(b"\xff\xda", first + 2)
    return whole[:second] + whole[first:second] * count + whole[second:]


BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "neither PNG nor JPEG"),
    "text": (lambda: b"<svg onload=alert(1)>", "neither PNG nor JPEG"),
    "gif": (lambda: encode(noise(4, 4).convert("P"), "GIF"), "neither PNG nor JPEG"),
    "tiff": (lambda: encode(noise(4, 4), "TIFF"), "neither PNG nor JPEG"),
    "webp": (lambda: encode(noise(4, 4), "WEBP"), "neither PNG nor JPEG"),
    "postscript": (lambda: encode(noise(4, 4), "EPS"), "neither PNG nor JPEG"),
    "truncated png": (lambda: encode(noise(64, 64))[:-4000], "cannot be decoded"),
    "truncated jpeg": (lambda: encode(noise(64, 64), "JPEG")[:-900], "cannot be decoded"),
    "header only": (lambda: encode(noise(64, 64))[:33], "neither PNG nor JPEG"),
    "bomb": (lambda: png_of_size(60000, 60000), "scale it down"),
    "bomb below Pillow's limit": (lambda: png_of_size(2**13, 2**12 + 1), "scale it down"),
    "bomb beyond integers": (lambda: png_of_size(2**31 - 1, 2**31 - 1), "scale it down"),
    "no pixels": (lambda: png_of_size(0, 0), "neither PNG nor JPEG"),
    "pixels missing": (lambda: png_of_size(500, 500, b"\0" * 100), "cannot be decoded"),
    "animated": (
        lambda: encode(noise(8, 8), save_all=True, append_images=[noise(8, 8, seed=1)]),
        "animated",
    ),
    "scans": (lambda: scans(MAX_JPEG_SCANS), "scans"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_whole_picture_is_refused_at_once(name: str) -> None:
    make, why = BROKEN[name]
    data = make()
    began = time.thread_time()
    with pytest.raises(BadPicture, match=why):
        decode_picture(data)
    assert time.thread_time() - began < 1


def test_damage_anywhere_is_refused_or_harmless() -> None:
    rng = random.Random(3)
    for kind in ("PNG", "JPEG"):
        whole = encode(noise(24, 24), kind)
        for _ in range(300):
            hurt = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                hurt[rng.randrange(len(hurt))] = rng.randrange(256)
            try:
                found = decode_picture(bytes(hurt))
            except BadPicture:
                continue
            assert found.nbytes == found.width * found.height * 3


@pytest.mark.parametrize("size", [1, 2, 3, 1000, SLICE_CHARACTERS // 4 * 3, SLICE_CHARACTERS + 1])
def test_base64_is_decoded_in_slices(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert decode_base64(base64.b64encode(data).decode()) == data


@pytest.mark.parametrize(
    "text",
    [
        "A",
        "QUJD=",
        "QU JD",
        "QUJD\n",
        "QUJ_",
        "ÄÖÜß",
        "=" * 8,
        "data:image/png;base64,QUJD",
        "QQ==" * 2,
        "A" * (SLICE_CHARACTERS - 4) + "QQ==" + "QUJD",
    ],
    ids=lambda text: text[:8],
)
def test_what_is_not_base64_is_refused(text: str) -> None:
    with pytest.raises(BadPicture, match="base64"):
        decode_base64(text)


def test_too_many_bytes_are_refused() -> None:
    with pytest.raises(BadPicture, match="encode it smaller"):
        decode_base64(base64.b64encode(bytes(MAX_IMAGE_BYTES + 1)).decode())


def picture(name: str, size: int = 10) -> Picture:
    return Picture(content_ref(name.encode()), size, 1, bytes(size * 3))


def test_the_store_drops_what_was_not_used_for_the_longest_time() -> None:
    store = PictureStore(90)
    kept = [store.keep_picture(picture(name)).ref for name in "abc"]
    assert store.find_picture(kept[0]) is not None
    store.keep_picture(picture("d"))
    gc.collect()
    assert [store.find_picture(ref) is not None for ref in kept] == [True, False, True]
    assert (len(store), store.nbytes) == (3, 90)


def test_a_picture_in_use_is_found_though_it_was_dropped() -> None:
    store = PictureStore(30)
    held = store.keep_picture(picture("a"))
    store.keep_picture(picture("b"))
    assert store.find_picture(held.ref) is held
    assert store.keep_picture(picture("a")) is held, "the same bytes twice are one picture"


def test_a_picture_beyond_the_store_is_found_only_while_it_is_used() -> None:
    store = PictureStore(30)
    held = store.keep_picture(picture("a", 11))
    ref = held.ref
    assert store.find_picture(ref) is held
    assert store.nbytes == 0
    del held
    assert store.find_picture(ref) is None


def test_the_store_is_full_while_requests_have_too_many_pictures() -> None:
    store = PictureStore(30, 60)
    held = [store.keep_picture(picture(name)) for name in "ab"]
    assert store.is_full
    held.clear()
    assert not store.is_full
